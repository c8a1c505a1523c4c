"""``hierdist checkpoint``: what it prints, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lightning_dist.checkpoint import leases
from lightning_dist.checkpoint.export import load_safetensors
from lightning_dist.checkpoint.local_disk import LocalFolder
from lightning_dist.checkpoint.save_ids import manifest_file, next_save_id
from lightning_dist.checkpoint.storage import open_folder
from lightning_dist.cli import main
from lightning_dist.errors import StorageError
from tests.support.saves import every_type, same, save_by_ranks


def make(path: Path, *, step: int = 1, value: float = 1.0, ranks: int = 2, loss: float = 0.5) -> Path:
    weight = torch.full((30, 4), value)
    state = {"model.weight": weight, "model.tied": weight, "model.bias": torch.arange(4), "loops": {"step": step}}
    options = {"parallel": {"mode": "zero2", "tensor": {"size": None}}}
    record = {"step": step, "loss": loss, "world_size": ranks, "options": options}
    save_by_ranks([{**state}] * ranks, open_folder(path), record=record, created_s=float(step))
    return path


def test_ls_and_show_say_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "s1", step=1)
    make(tmp_path / "s2", step=2)
    (tmp_path / "s2/COMMITTED").unlink()
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "whole" in printed
    assert "s2" in printed
    assert "COMMITTED" in printed
    assert main(["checkpoint", "show", str(tmp_path / "s1")]) == 0
    printed = capsys.readouterr().out
    for text in (
        "30 x 4",
        "float32",
        "tied to model.weight",
        "int64",
        "loops",
        "host0",
        "0-1",
        "world_size",
        "options.parallel",
        "mode=zero2, tensor=size=None",
    ):
        assert text in printed, text
    assert main(["checkpoint", "show", str(tmp_path / "s2")]) == 2
    assert "was cut off" in capsys.readouterr().err
    assert main(["checkpoint", "ls", str(tmp_path / "s1")]) == 2
    assert "holds no sharded checkpoints" in capsys.readouterr().err


def test_verify_finds_a_changed_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "s1")
    assert main(["checkpoint", "verify", str(tmp_path / "s1")]) == 0
    assert "as written" in capsys.readouterr().out
    shard = next((tmp_path / "s1").glob("rank00000*"))
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    assert main(["checkpoint", "verify", "--fast", str(tmp_path / "s1")]) == 0
    assert main(["checkpoint", "verify", str(tmp_path / "s1")]) == 1
    assert f"{shard.name} is not what was written" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert shard.name in capsys.readouterr().out


def test_diff_compares_values_of_other_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b", ranks=3)
    assert main(["checkpoint", "diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "no differences" in capsys.readouterr().out
    make(tmp_path / "c", value=2.0)
    assert main(["checkpoint", "diff", str(tmp_path / "a"), str(tmp_path / "c"), "--no-values"]) == 0
    assert main(["checkpoint", "diff", str(tmp_path / "a"), str(tmp_path / "c")]) == 1
    printed = capsys.readouterr().out
    assert "model.weight" in printed
    assert "model.bias" not in printed


def test_prune_keeps_what_is_asked_for_and_what_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step, loss in ((1, 0.1), (2, 0.9), (3, 0.8), (4, 0.7)):
        make(tmp_path / f"s{step}", step=step, loss=loss)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / manifest_file(next_save_id([], now_s=1.0, token=2))).write_bytes(b"{}")
    marker = make(tmp_path / "foreign", step=0, loss=1.0) / "COMMITTED"
    marker.write_text(json.dumps({**json.loads(marker.read_bytes()), "version": 1}))
    root, keep = str(tmp_path), ["--keep-best", "1", "--monitor", "loss"]
    assert main(["checkpoint", "prune", root, *keep, "--dry-run"]) == 0
    assert "would delete" in capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == 6
    with leases.leased(open_folder(tmp_path / "s2"), host="reader"):
        assert main(["checkpoint", "prune", root, *keep, "--torn"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign", "s1", "s2", "s4"]
    assert "read by reader" in capsys.readouterr().out
    assert main(["checkpoint", "prune", root, "--keep-best", "1"]) == 2
    assert main(["checkpoint", "prune", root, "--keep-last", "0"]) == 2
    assert main(["checkpoint", "prune", root, "--option", "x"]) == 2


@pytest.mark.parametrize("ending", ["safetensors", "ckpt"])
def test_export_writes_one_file(tmp_path: Path, ending: str) -> None:
    state = {f"net.{name}": value for name, value in every_type().items()}
    state["net.tied"] = state["net.float32"]
    save_by_ranks([{**state, "opt": torch.ones(3)}] * 2, open_folder(tmp_path / "c"))
    output = tmp_path / f"model.{ending}"
    assert main(["checkpoint", "export", str(tmp_path / "c"), str(output), "--prefix", "net."]) == 0
    if ending == "ckpt":
        loaded = torch.load(output, weights_only=True)["state_dict"]
    else:
        loaded = load_safetensors(output)
        assert load_file(output).keys() == loaded.keys() - {"tied"}
    assert loaded.keys() == {name.removeprefix("net.") for name in state}
    assert [name for name, value in state.items() if not same(loaded[name.removeprefix("net.")], value)] == []
    assert loaded["tied"].data_ptr() == loaded["float32"].data_ptr()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", output.name]


def test_commands_say_that_they_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "s1")
    unleased: list[str] = []
    read_into = LocalFolder.read_into

    def read(self: LocalFolder, name: str, start: int, target: memoryview) -> None:
        if not leases.readers(self):
            unleased.append(name)
        read_into(self, name, start, target)

    monkeypatch.setattr(LocalFolder, "read_into", read)
    assert main(["checkpoint", "verify", str(path)]) == 0
    assert main(["checkpoint", "diff", str(path), str(path)]) == 0
    assert main(["checkpoint", "export", str(path), str(tmp_path / "a.safetensors")]) == 0
    assert main(["checkpoint", "export", str(path), str(tmp_path / "a.ckpt"), "--prefix", "model."]) == 0
    assert unleased == []
    assert not list(path.glob("READING-*"))


def test_a_folder_that_may_not_be_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "s1")

    def refuse(self: LocalFolder, name: str, buffers: object) -> None:
        raise StorageError(f"cannot write {name}: no credentials")

    monkeypatch.setattr(LocalFolder, "write", refuse)
    assert main(["checkpoint", "verify", str(path)]) == 0


def test_export_refuses_an_ending_of_no_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "c")
    assert main(["checkpoint", "export", str(tmp_path / "c"), str(tmp_path / "model.bin")]) == 2
    assert "name it .safetensors, or .ckpt" in capsys.readouterr().err
    assert not (tmp_path / "model.bin").exists()
