"""Saves into one folder that do not wait for each other: what began last is what is there in the end, whole."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dist.checkpoint import catalog
from lightning_dist.checkpoint.local_disk import LocalFolder
from lightning_dist.checkpoint.manifest import MARKER_FILE
from lightning_dist.checkpoint.save_ids import (
    is_manifest,
    is_save_id,
    manifest_file,
    next_save_id,
    save_id_of,
    shard_file,
)
from lightning_dist.checkpoint.save_planner import SharedSavePlanner
from lightning_dist.checkpoint.shard_writer import ShardWriter
from lightning_dist.checkpoint.storage import open_folder
from lightning_dist.errors import CheckpointError, DamagedCheckpointError
from tests.support.saves import load_on_rank


class Save:
    """A save of one rank, step by step."""

    def __init__(self, path: Path, value: float) -> None:
        self.state = {"w": torch.full((50,), value)}
        self.writer = ShardWriter(open_folder(path), rank=0, host="h", record={"value": value})
        self.planner = SharedSavePlanner(chunk_bytes=64)
        self.committed = False
        self.steps = iter((self.begin, self.write, self.commit))

    def begin(self) -> None:
        self.planner.set_up_planner(self.state, self.writer.storage_meta(), True)
        self.writer.set_up_storage_writer(True)
        plans, self.metadata = self.planner.create_global_plan([self.planner.create_local_plan()])
        self.plan = self.writer.prepare_global_plan(plans)[0]

    def write(self) -> None:
        self.results = self.writer.write_data(self.planner.finish_plan(self.plan), self.planner).wait()

    def commit(self) -> None:
        self.writer.finish(self.metadata, [self.results])
        self.committed = True

    def finish(self) -> None:
        for step in self.steps:
            step()


def assert_holds(path: Path, value: float) -> None:
    """The folder is the checkpoint of a value and has nothing else that is whole."""
    checkpoint = catalog.open_checkpoint(open_folder(path), full=True)
    assert checkpoint.manifest.record["value"] == value
    assert (load_on_rank({"w": torch.zeros(50)}, checkpoint.folder)["w"] == value).all()


@pytest.mark.parametrize("order", sorted(set(itertools.permutations("aaabbb"))), ids="".join)
@pytest.mark.parametrize("is_first", [True, False])
def test_who_began_last_is_there_in_the_end(tmp_path: Path, order: tuple[str, ...], is_first: bool) -> None:
    """Step by step in any order, into an empty folder or over a checkpoint."""
    path = tmp_path / "c"
    if not is_first:
        Save(path, 0.0).finish()
    saves = {name: Save(path, value) for name, value in (("a", 1.0), ("b", 2.0))}
    last = max(saves, key=order.index)
    given_up = set()
    for name in order:
        if name in given_up:
            continue
        expecting = contextlib.nullcontext() if name == last else contextlib.suppress(CheckpointError)
        given_up.add(name)
        with expecting:
            next(saves[name].steps)()
            given_up.remove(name)
        if not is_first and not any(save.committed for save in saves.values()):
            assert_holds(path, 0.0)  # what is replaced is whole until another one is
    assert saves[last].committed
    assert_holds(path, {"a": 1.0, "b": 2.0}[last])


def at_write_of(
    names: Callable[[str], bool], action: Callable[[], None], *, after: bool, patch: pytest.MonkeyPatch
) -> None:
    """Once, before or after a file is written."""
    write, left = LocalFolder.write, [1]

    def written(self: LocalFolder, name: str, buffers: Any) -> None:
        hit = names(name) and left[0]
        left[0] -= bool(hit)
        if hit and not after:
            action()
        write(self, name, buffers)
        if hit and after:
            action()

    patch.setattr(LocalFolder, "write", written)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("what", [lambda name: name.startswith("rank"), is_manifest, lambda name: name == MARKER_FILE])
def test_a_save_that_is_held_up_for_the_whole_of_another_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: Callable[[str], bool], after: bool, is_first: bool
) -> None:
    """Also just before it would write its marker."""
    path = tmp_path / "c"
    if not is_first:
        Save(path, 0.0).finish()
    late, new = Save(path, 1.0), Save(path, 2.0)
    at_write_of(what, new.finish, after=after, patch=monkeypatch)
    with pytest.raises(CheckpointError, match=r"another save has begun there since|wrote .* are there"):
        late.finish()
    assert_holds(path, 2.0)
    Save(path, 3.0).finish()
    assert_holds(path, 3.0)
    assert len(list(path.iterdir())) == 3  # nothing is left of the others


def test_what_is_left_of_saves_that_were_cut_off_goes(tmp_path: Path) -> None:
    path = tmp_path / "c"
    Save(path, 1.0).finish()
    for _ in range(3):
        cut_off = Save(path, 2.0)
        cut_off.begin()
        cut_off.write()
        assert len(list(path.iterdir())) == 4  # the whole one's, and one file
        assert_holds(path, 1.0)
    (path / "mine.txt").write_text("not ours")
    Save(path, 3.0).finish()
    assert len(list(path.iterdir())) == 4
    catalog.delete(open_folder(tmp_path), "c")
    assert [each.name for each in path.iterdir()] == ["mine.txt"]


def test_ids_grow_and_name_files() -> None:
    first = next_save_id(["COMMITTED", "x.bin", "rank00001-.bin"], now_s=1e9, token=0xFFFFF)
    names = [shard_file(12, first), manifest_file(first)]
    assert [save_id_of(name) for name in names] == [first, first]
    assert [is_manifest(name) for name in names] == [False, True]
    second = next_save_id(names, now_s=0.0, token=0)  # of a clock that is behind
    assert first < second
    assert is_save_id(second)
    assert not is_save_id("../" + second[3:])
    assert save_id_of("COMMITTED") is None


def test_a_marker_leads_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "c"
    Save(path, 1.0).finish()
    marker = (path / MARKER_FILE).read_text()
    save_id = marker.split('"save_id": "')[1].split('"')[0]
    (path / MARKER_FILE).write_text(marker.replace(save_id, "../../" + save_id[6:]))
    with pytest.raises(DamagedCheckpointError, match="COMMITTED is not what was written"):
        catalog.open_checkpoint(open_folder(path))
