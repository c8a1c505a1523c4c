"""The variables that ranks are started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dist.elastic.agent.environment import rank_environment, template_environment
from lightning_dist.elastic.rounds import Round, Seat
from lightning_dist.errors import LaunchError
from lightning_dist.launched_outside import check_environment

ROUND = Round(3, (Seat("a", "10.0.0.1", 3), Seat("b", "10.0.0.2", 1)), "my-run")


def test_a_rank_knows_its_place_as_under_torchrun() -> None:
    found = rank_environment(
        {"HOME": "/home/me", "OMP_NUM_THREADS": "4"},
        round=ROUND,
        host="b",
        local_rank=0,
        master=("10.0.0.1", 4001),
        folder=Path("/tmp/agent"),
        record=Path("/runs/1"),
    )
    assert found == {
        "HOME": "/home/me",
        "OMP_NUM_THREADS": "4",
        "RANK": "3",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1",
        "NODE_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4001",
        "TORCHELASTIC_RUN_ID": "my-run",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "HIERDIST_AGENT": "/tmp/agent",
        "HIERDIST_RUN": "my-run",
        "HIERDIST_ROUND": "3",
        "HIERDIST_HOST": "b",
        "HIERDIST_RECORD": "/runs/1",
    }
    check_environment(1, 2, found)  # hosts of different sizes are no contradiction


def test_a_trainer_that_asks_for_other_ranks_is_told_how_these_were_started() -> None:
    found = rank_environment({}, round=ROUND, host="b", local_rank=0, master=("10.0.0.1", 4001), folder=Path("/agent"))
    with pytest.raises(LaunchError, match=r"hierdist launch has started 4 ranks .* start it with --ranks-per-host 3"):
        check_environment(3, 2, found)


def test_what_an_outer_launcher_has_set_does_not_count() -> None:
    outer = {"RANK": "9", "LOCAL_RANK": "9", "MASTER_PORT": "1", "HIERDIST_ROUND": "9", "HIERDIST_HOST": "outer"}
    found = rank_environment(
        outer, round=ROUND, host="a", local_rank=2, master=("10.0.0.1", 4001), folder=Path("/tmp/agent")
    )
    assert (found["RANK"], found["LOCAL_RANK"], found["HIERDIST_ROUND"]) == ("2", "2", "3")
    assert found["HIERDIST_HOST"] == "a"
    assert "HIERDIST_RECORD" not in found


def test_ranks_compute_in_one_thread_unless_told_otherwise() -> None:
    assert template_environment({})["OMP_NUM_THREADS"] == "1"
    assert template_environment({"OMP_NUM_THREADS": "8"})["OMP_NUM_THREADS"] == "8"
