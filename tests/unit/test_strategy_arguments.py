"""A wrong argument of the strategy is refused when it is made, with the right ones, before any process starts."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_dist import HierDistStrategy
from lightning_dist.errors import ConfigError, UnknownOptionError


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sync": "hierachical"}, "Did you mean hierarchical"),
        ({"parallel": "zero"}, "parallel='zero' is unknown; allowed: ddp"),
        (
            {"topology": {"host": "a", "hots": {}}},
            "topology.hots is unknown; the options of topology are: tiers, host, hosts",
        ),
        ({"sync": {"bucket_bytes": "8MB"}}, "sync.bucket_bytes is a number of bytes"),
        ({"sync": {"timeout_s": 0}}, "must be at least 0.1 seconds"),
        ({"find_unused_params": True}, "Did you mean find_unused_parameters"),
        ({"proces_group_backend": "gloo"}, "process_group_backend"),
        ({"start_method": "thread"}, "start_method='thread' is unknown"),
    ],
)
def test_a_wrong_argument_lists_the_right_ones(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        HierDistStrategy(**arguments)
    assert said in str(refused.value)


def test_a_comm_hook_of_ones_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose what it does with sync="):
        HierDistStrategy(ddp_comm_hook=print)


def test_what_ddp_takes_is_passed_on() -> None:
    strategy = HierDistStrategy(bucket_cap_mb=10, static_graph=True)
    assert strategy.parallel_config.static_graph
    with pytest.raises(UnknownOptionError):
        HierDistStrategy(process_group=None)
