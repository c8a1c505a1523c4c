"""The catalog: the newest whole checkpoint is found; what is not whole is said by file and reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_dist.checkpoint import catalog, leases
from lightning_dist.checkpoint.storage import open_folder
from lightning_dist.errors import (
    CheckpointError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    UncommittedCheckpointError,
)
from tests.support.saves import save_by_ranks


def make(root: Path, name: str, *, created_s: float, step: int = 0) -> Path:
    state = {"w": torch.full((40,), float(step)), "loops": {"step": step}}
    save_by_ranks([{**state}] * 2, open_folder(root / name), record={"step": step}, created_s=created_s)
    return root / name


def shard(path: Path) -> Path:
    return sorted(path.glob("rank*.bin"))[1]


def cut_short(path: Path) -> None:
    shard(path).write_bytes(shard(path).read_bytes()[:-1])


def other_version(path: Path) -> None:
    body = json.loads((path / "COMMITTED").read_bytes())
    (path / "COMMITTED").write_text(json.dumps({**body, "version": 9}))


def flip(path: Path) -> None:
    data = bytearray(shard(path).read_bytes())
    data[3] ^= 1
    shard(path).write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], None], type[CheckpointError], str]] = {
    "torn": (
        lambda path: (path / "COMMITTED").unlink(),
        UncommittedCheckpointError,
        "has no COMMITTED: its save was cut",
    ),
    "no manifest": (
        lambda path: next(path.glob("manifest-*.json")).unlink(),
        DamagedCheckpointError,
        r"manifest-\w+.json is missing",
    ),
    "missing shard": (lambda path: shard(path).unlink(), DamagedCheckpointError, r"rank00001.*bin is missing; rank 1"),
    "truncated": (cut_short, DamagedCheckpointError, r"rank00001.*bin has \d+ bytes, \d+ were written"),
    "foreign": (other_version, ForeignCheckpointError, "COMMITTED: version is 9"),
    "empty marker": (
        lambda path: (path / "COMMITTED").write_bytes(b""),
        DamagedCheckpointError,
        "COMMITTED is no JSON",
    ),
    "flipped": (flip, DamagedCheckpointError, r"rank00001.*bin is not what was written: crc32"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_not_whole_is_skipped_or_an_error_by_name(tmp_path: Path, kind: str) -> None:
    damage, error, message = DAMAGE[kind]
    make(tmp_path, "old", created_s=1, step=1)
    make(tmp_path, "good", created_s=2, step=2)
    bad = make(tmp_path, "bad", created_s=3, step=3)
    damage(bad)
    root, full = open_folder(tmp_path), kind == "flipped"
    with pytest.raises(error, match=message):
        catalog.open_checkpoint(root.child("bad"), full=full)
    with pytest.warns(UserWarning, match=message) as warned:
        found = catalog.newest(root, full=full)
    assert len(warned) == 1
    assert "/bad" in str(warned[0].message)
    assert found is not None
    assert found.manifest.record == {"step": 2}
    survey = {entry.name: entry.problem for entry in catalog.survey(root, full=full)}
    assert survey["good"] is survey["old"] is None
    assert isinstance(survey["bad"], error)


def test_newest_goes_by_commit_then_step_and_leaves_out_other_folders(tmp_path: Path) -> None:
    make(tmp_path, "z", created_s=1, step=9)
    make(tmp_path, "a", created_s=2, step=1)
    make(tmp_path, "b", created_s=2, step=2)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/x").write_text("x")
    (tmp_path / "last.ckpt").write_bytes(b"x")
    root = open_folder(tmp_path)
    assert [entry.name for entry in catalog.survey(root)] == ["b", "a", "z"]
    assert catalog.newest(root).folder.url == f"{tmp_path}/b"  # type: ignore[union-attr]
    assert catalog.newest(open_folder(tmp_path / "nothing")) is None
    with pytest.raises(UncommittedCheckpointError, match="logs holds no sharded checkpoint"):
        catalog.open_checkpoint(root.child("logs"))


def test_overwriting_leaves_nothing_of_the_old(tmp_path: Path) -> None:
    path = make(tmp_path, "last", created_s=1, step=1)
    before = set(path.iterdir())
    (path / "note.txt").write_text("mine")
    make(tmp_path, "last", created_s=2, step=2)
    assert {p.name for p in set(path.iterdir()) & before} == {"COMMITTED"}
    assert (path / "note.txt").exists()
    assert catalog.open_checkpoint(open_folder(path), full=True).manifest.record == {"step": 2}


def test_deleting_removes_the_marker_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_dist.checkpoint.local_disk import LocalFolder

    make(tmp_path, "c", created_s=1)
    removed: list[str] = []
    true_remove = LocalFolder.remove
    monkeypatch.setattr(LocalFolder, "remove", lambda s, name: (removed.append(name), true_remove(s, name)))
    catalog.delete(open_folder(tmp_path), "c")
    assert removed[0] == "COMMITTED"
    assert list(tmp_path.iterdir()) == []


def test_leases_say_who_reads_until_they_run_out(tmp_path: Path) -> None:
    now = [100.0]
    folder = open_folder(make(tmp_path, "c", created_s=1))
    with leases.leased(folder, host="h", duration_s=10, clock=lambda: now[0]):
        assert [who.split(" ")[0] for who in leases.readers(folder, clock=lambda: now[0])] == ["h"]
        leases.forget(folder, clock=lambda: now[0])
        assert leases.readers(folder, clock=lambda: now[0])
        catalog.open_checkpoint(folder)
        now[0] = 111
        assert leases.readers(folder, clock=lambda: now[0]) == []
    assert [name for name in folder.list() if name.startswith("READING")] == []
    folder.write("READING-broken", [b"{"])
    assert leases.readers(folder) == []
    leases.forget(folder)
    assert "READING-broken" not in folder.list()
