"""Ranks that torchrun has started again do not find what the dead have left in its store."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_dist.comm.agent_store import of_start, open_agent_store

TIMEOUT = timedelta(seconds=20)


@pytest.mark.parametrize("first", [0, 2])
def test_each_start_has_keys_of_its_own_which_all_its_ranks_share(first: int) -> None:
    agents = dist.HashStore()
    for start in (first, first + 1, first + 2):
        one = of_start(agents, str(start))
        assert not one.check(["address"])
        one.set("address", f"of start {start}")
        other = of_start(agents, str(start))  # it comes when the first one has long been there
        assert other.get("address") == f"of start {start}".encode()


def test_without_an_agents_store_there_is_none() -> None:
    assert open_agent_store({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, timeout=TIMEOUT) is None
    assert open_agent_store({"TORCHELASTIC_USE_AGENT_STORE": "False"}, timeout=TIMEOUT) is None
