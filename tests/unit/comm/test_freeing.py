"""Freeing blocked operations: order of NCCL's aborts, and what the flight recorder says."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_dist.comm.flight_recorder import in_words
from lightning_dist.comm.freeing import abort


class Communicator:
    """As much of NCCL's as is used; writes down what it is asked."""

    def __init__(self, name: str, log: list[str], *, is_broken: bool = False) -> None:
        self._name, self._log, self._is_broken = name, log, is_broken

    def abort(self) -> None:
        self._log.append(f"abort {self._name}")
        if self._is_broken:
            raise RuntimeError("it cannot be aborted")

    def _group_start(self) -> None:
        self._log.append("start")

    def _group_end(self) -> None:
        self._log.append("end")


def test_all_communicators_are_aborted_inside_one_bracket_the_last_first() -> None:
    log: list[str] = []
    abort([Communicator("world", log), Communicator("cross", log)])
    assert log == ["start", "abort cross", "abort world", "end"]


def test_the_bracket_is_closed_whatever_happens() -> None:
    log: list[str] = []
    with pytest.raises(RuntimeError, match="cannot be aborted"):
        abort([Communicator("world", log, is_broken=True)])
    assert log == ["start", "abort world", "end"]


def test_without_communicators_nothing_is_aborted() -> None:
    abort([])


# As torch 2.13 writes them; of NCCL's the documentation of its flight recorder says so.
GLOO = {
    "collective_seq_id": 2,
    "input_sizes": [[4]],
    "is_p2p": False,
    "p2p_seq_id": 0,
    "process_group": ["1", "cross"],
    "profiling_name": "gloo:all_reduce",
    "retired": False,
    "state": "scheduled",
    "time_created_ns": 1,
}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (GLOO, "gloo:all_reduce, number 2 on group 'cross', sizes [[4]], under way"),
        ({**GLOO, "retired": True}, "gloo:all_reduce, number 2 on group 'cross', sizes [[4]], ended"),
        ({**GLOO, "state": "completed"}, "gloo:all_reduce, number 2 on group 'cross', sizes [[4]], ended"),
        (
            {**GLOO, "profiling_name": "nccl:recv 0<-1", "is_p2p": True, "p2p_seq_id": 7, "state": "started"},
            "nccl:recv 0<-1, number 7 on group 'cross', sizes [[4]], under way",
        ),
        ({"profiling_name": "nccl:all_reduce_barrier"}, "nccl:all_reduce_barrier, under way"),
        ({}, "an operation, under way"),
    ],
)
def test_an_operation_in_words(entry: dict[str, Any], words: str) -> None:
    assert in_words(entry) == words
