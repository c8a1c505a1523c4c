"""A checkpoint read once by the ranks of a host, which are threads."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dist.checkpoint.catalog import read_manifest
from lightning_dist.checkpoint.load_planner import FillPlanner
from lightning_dist.checkpoint.local_disk import LocalFolder
from lightning_dist.checkpoint.shard_reader import ShardReader
from lightning_dist.comm.host_relay import MemoryRelay
from lightning_dist.errors import DamagedCheckpointError
from lightning_dist.retry import Retry
from tests.support.saves import dealt, every_type, same, save_by_ranks, zeros_like
from tests.unit.comm.test_host_relay import relays


class CountingFolder(LocalFolder):
    """Counts what is read of shards."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, str(path), Retry())
        self.spans: Counter[tuple[str, int, int]] = Counter()
        self._lock = threading.Lock()

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        with self._lock:
            self.spans[(name, start, len(target))] += 1
        super().read_into(name, start, target)

    @property
    def size_bytes(self) -> int:
        return sum(size * count for (_, _, size), count in self.spans.items())


def read_on(
    relay: MemoryRelay,
    folder: LocalFolder,
    state: dict[str, Any],
    *,
    planner: FillPlanner | None = None,
    failures: list[Exception | None] | None = None,
) -> dict[str, Any]:
    """Fill a state on one rank; what it raises is put into ``failures``, where given."""
    planner = planner or FillPlanner()
    reader = ShardReader(folder, manifest=read_manifest(folder), relay=relay)
    planner.set_up_planner(state, reader.read_metadata())
    try:
        reader.read_data(planner.create_local_plan(), planner).wait()
    except Exception as error:
        if failures is None:
            raise
        failures[relay.index] = error
    return state


def read_by_host(
    members: Sequence[MemoryRelay], folder: LocalFolder, states: Sequence[dict[str, Any]], **arguments: Any
) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(members)) as threads:
        return list(threads.map(lambda m: read_on(m, folder, states[m.index], **arguments), members))


def saved(path: Path, states: Sequence[dict[str, Any]], **arguments: Any) -> CountingFolder:
    folder = CountingFolder(path)
    save_by_ranks(states, folder, **arguments)
    return folder


# 64 bytes: the largest chunk is one slot, or takes several.
@pytest.mark.parametrize(("chunk_bytes", "slot_bytes"), [(64, 64), (1 << 20, 64), (64, 1 << 12)])
def test_all_types_reach_all_ranks_and_are_read_once(tmp_path: Path, chunk_bytes: int, slot_bytes: int) -> None:
    tensors = every_type()
    states = [{**tensors, f"rng/{rank}": {"rank": rank}, "loops": {"step": 3}} for rank in range(2)]
    wanted = {**zeros_like(tensors), "loops": None, "rng/0": None, "rng/1": None}
    folder = saved(tmp_path, states, chunk_bytes=chunk_bytes)
    with relays(3, slot_bytes) as members:
        for state in read_by_host(members, folder, [dict(zeros_like(wanted)) for _ in members]):
            assert all(same(state[name], value) for name, value in tensors.items())
            assert (state["loops"], state["rng/0"], state["rng/1"]) == ({"step": 3}, {"rank": 0}, {"rank": 1})
        assert set(folder.spans.values()) == {1}
        files = {path.name: path.stat().st_size for path in tmp_path.glob("rank*")}
        assert folder.size_bytes <= sum(files.values())
        assert len(folder.spans) >= 2


@pytest.mark.parametrize("seed", range(4))
def test_any_parts_are_filled_as_by_each_rank_alone(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    wholes = {"a": torch.randn(37, 11), "b": torch.randn(300), "c": torch.arange(60).reshape(3, 4, 5)}
    folder = saved(tmp_path, [dict(wholes)] * 2, chunk_bytes=256)
    with relays(3, 512) as members:
        states: list[dict[str, Any]] = [{} for _ in members]
        for name, whole in wholes.items():
            for state, held in zip(states, dealt(name, torch.zeros_like(whole), 3, rng), strict=True):
                state[name] = held
        for state in read_by_host(members, folder, states):
            for name, held in state.items():
                for piece in held.pieces:
                    index = tuple(
                        slice(offset, offset + size)
                        for offset, size in zip(piece.piece.offsets, piece.piece.sizes, strict=True)
                    )
                    assert torch.equal(piece.data, wholes[name][index])
        assert set(folder.spans.values()) == {1}


def test_large_chunks_of_one_rank_go_straight_to_it(tmp_path: Path) -> None:
    """They are not relayed: the slots are far too small to be filled by them once."""
    large = {f"large{rank}": torch.randn(1 << 18) for rank in range(2)}
    folder = saved(tmp_path, [large, {}], chunk_bytes=1 << 20)
    with relays(2, 1 << 12) as members:
        states = [{f"large{rank}": torch.zeros(1 << 18)} for rank in range(2)]
        for rank, state in enumerate(read_by_host(members, folder, states)):
            assert torch.equal(state[f"large{rank}"], large[f"large{rank}"])
        assert sorted(folder.spans.values()) == [1, 1]


@pytest.mark.parametrize("slot_bytes", [1 << 8, 1 << 12])
@pytest.mark.parametrize("kind", ["changed", "short", "gone"])
def test_one_damage_ends_all_and_is_told_by_who_found_it(tmp_path: Path, kind: str, slot_bytes: int) -> None:
    """A reader that fails; where a chunk takes several slots, each rank finds it."""
    tensors = {f"t{number}": torch.randn(200) for number in range(12)}
    folder = saved(tmp_path, [tensors] * 2, chunk_bytes=1 << 10)
    with relays(3, slot_bytes) as members:
        victim = sorted(tmp_path.glob("rank00001*"))[0]
        data = bytearray(victim.read_bytes())
        data[-1] ^= 1
        victim.unlink() if kind == "gone" else victim.write_bytes(data if kind == "changed" else data[:-5])
        failures: list[Exception | None] = [None] * 3
        for _ in range(2):  # and the ranks can read again afterwards
            read_by_host(members, folder, [zeros_like(tensors) for _ in members], failures=failures)
            told = [error for error in failures if error is not None]
            assert told
            for error in told:
                assert isinstance(error, DamagedCheckpointError)
                assert victim.name in str(error)
            failures = [None] * 3


class Failing(FillPlanner):
    """Cannot take objects."""

    def load_bytes(self, *_: Any) -> None:
        raise RuntimeError("this rank's own")


def test_what_one_rank_cannot_use_ends_the_others_too(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.randn(200) for number in range(12)}
    folder = saved(tmp_path, [{**tensors, "loops": {"a": 1}}], chunk_bytes=1 << 10)
    failures: list[Exception | None] = [None] * 2
    planners = [FillPlanner(), Failing()]
    with relays(2, 1 << 12) as members, ThreadPoolExecutor(2) as threads:
        states = [{**zeros_like(tensors), "loops": None} for _ in members]
        for member, planner in zip(members, planners, strict=True):
            state = states[member.index]
            threads.submit(read_on, member, folder, state, planner=planner, failures=failures)
    assert [str(error) for error in failures] == ["None", "this rank's own"]


def test_ranks_that_read_different_checkpoints_are_told(tmp_path: Path) -> None:
    failures: list[Exception | None] = [None] * 2
    folders = []
    for rank in range(2):
        save_by_ranks([{"a": torch.ones(5)}], folder := CountingFolder(tmp_path / str(rank)))
        folders.append(folder)
    with relays(2, 64) as members, ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda m: read_on(m, folders[m.index], {"a": torch.zeros(5)}, failures=failures), members))
    assert ["read different checkpoints" in str(error) for error in failures] == [True, True]
