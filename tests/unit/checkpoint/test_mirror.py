"""Storage and memory written as one: both whole, or memory without anything older; storage never the worse for it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_dist.checkpoint.catalog import newest, open_checkpoint
from lightning_dist.checkpoint.keeper.client import Endpoint, Keeper
from lightning_dist.checkpoint.keeper.folder import KeptFolder
from lightning_dist.checkpoint.local_disk import LocalFolder
from lightning_dist.checkpoint.manifest import MARKER_FILE
from lightning_dist.checkpoint.mirror import MirroredFolder
from lightning_dist.checkpoint.storage import open_folder
from lightning_dist.errors import StorageError
from tests.support.keepers import keeping
from tests.support.saves import load_on_rank, save_by_ranks

NOBODY = Keeper(Endpoint("", "nobody-is-called-so"))


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((64, 9), value), "b": torch.full((5,), value)}


def save(storage: Path, memory: KeptFolder, step: int) -> MirroredFolder:
    folder = MirroredFolder(open_folder(storage / f"{step}"), memory.child(f"{step}@a-{step}"))
    save_by_ranks([state(step)] * 2, folder, record={"step": step}, created_s=float(step))
    return folder


def steps(storage: Path, memory: KeptFolder) -> tuple[Any, Any]:
    """The newest that is whole, to the byte, in storage and in memory."""
    found = [newest(root, full=True) for root in (open_folder(storage), memory)]
    return tuple(None if each is None else each.manifest.record["step"] for each in found)  # type: ignore[return-value]


def test_both_are_whole_and_the_same(tmp_path: Path) -> None:
    with keeping() as keeper:
        memory = KeptFolder([keeper])
        written = save(tmp_path, memory, 1).written
        assert sorted(name[:9] for name in written) == ["rank00000", "rank00001"]
        assert steps(tmp_path, memory) == (1, 1)
        kept, stored = open_checkpoint(memory.child("1@a-1")), open_checkpoint(open_folder(tmp_path / "1"))
        assert kept.manifest == stored.manifest
        assert torch.equal(load_on_rank(state(0), kept.folder)["w"], state(1)["w"])


def test_a_lost_keeper_costs_the_copy_and_all_older_ones(tmp_path: Path) -> None:
    with keeping() as keeper:
        memory = KeptFolder([keeper])
        save(tmp_path, memory, 1)
        with pytest.warns(UserWarning, match="a checkpoint is not kept in memory") as said:
            folder = save(tmp_path, KeptFolder([NOBODY, keeper]), 2)
        assert "keeper nobody-is-called-so: write failed: ConnectionRefusedError" in str(said[0].message)
        assert "lacks rank0000" in str(said[-1].message)
        assert folder.written == []
        assert steps(tmp_path, memory) == (2, None)
        assert keeper.folders() == ()


def test_a_checkpoint_that_does_not_fit_is_in_storage(tmp_path: Path) -> None:
    with keeping(limit_bytes=3000) as keeper:
        with pytest.warns(UserWarning, match="a checkpoint is not kept in memory") as said:
            save(tmp_path, KeptFolder([keeper]), 1)
        assert "of 3000 bytes are used" in str(said[0].message)
        assert steps(tmp_path, KeptFolder([keeper])) == (1, None)


class BreaksOff(KeptFolder):
    """Takes one buffer of each file."""

    def child(self, name: str) -> BreaksOff:
        return BreaksOff(self._keepers, name)

    def write(self, name: str, buffers: Iterable[Any]) -> None:
        next(iter(buffers))
        raise StorageError("broken off")


def test_checksums_are_those_of_storage_where_memory_broke_off(tmp_path: Path) -> None:
    with keeping() as keeper:
        with pytest.warns(UserWarning, match="a checkpoint is not kept in memory") as said:
            save(tmp_path, BreaksOff([keeper]), 1)
        assert "broken off" in str(said[0].message)
        assert steps(tmp_path, KeptFolder([keeper])) == (1, None)


def test_where_storage_fails_at_the_marker_memory_has_the_newest(tmp_path: Path) -> None:
    write = LocalFolder.write

    def refuse_marker(self: LocalFolder, name: str, buffers: Any) -> None:
        if name == MARKER_FILE:
            raise StorageError("no marker")
        write(self, name, buffers)

    with keeping() as keeper:
        memory = KeptFolder([keeper])
        save(tmp_path, memory, 1)
        with patch.object(LocalFolder, "write", refuse_marker), pytest.raises(StorageError, match="no marker"):
            save(tmp_path, memory, 2)
        with pytest.warns(UserWarning, match="2 has no COMMITTED"):
            assert steps(tmp_path, memory) == (1, 2)
