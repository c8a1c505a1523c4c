"""What a strategy does with checkpoints, as far as one rank shows it."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dist import HierDistStrategy


class Agreement:
    """Of two ranks: rank 0 names another file than this one, and sees the same."""

    def __init__(self, name: str) -> None:
        self._name = zlib.crc32(name.encode())

    def exchange(self, number: int) -> list[int]:
        return [self._name if number > 1 else number, number]


def test_a_rank_that_found_another_last_checkpoint_loads_that_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one file, as of a sharded one."""
    paths = [str(tmp_path / name) for name in ("last-v1.ckpt", "last.ckpt")]
    for rank, path in enumerate(paths):
        torch.save({"found_by": rank}, path)
    strategy = HierDistStrategy()
    agreement: Any = Agreement("last-v1.ckpt")
    monkeypatch.setattr(strategy, "_agreement", agreement)
    monkeypatch.setattr(strategy, "broadcast", lambda said: paths[0])
    with pytest.warns(UserWarning, match=r"rank 0 loads .*last-v1.ckpt, and this rank had found .*last.ckpt"):
        loaded = strategy.load_checkpoint(paths[1])
    assert loaded == {"found_by": 0}


class Skipping:
    """A saver that has skipped the newest request, since it is writing the one before."""

    has_skipped = True


def test_a_folder_whose_writing_has_just_begun_stays_when_the_next_save_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "epoch=0-step=2.ckpt"
    begun.mkdir()
    strategy = HierDistStrategy(checkpoint={"mode": "async_sharded", "when_busy": "skip"})
    monkeypatch.setattr(strategy, "_saver", Skipping())
    with pytest.warns(UserWarning, match="has been skipped"):
        strategy.remove_checkpoint(begun)
    assert begun.exists()
