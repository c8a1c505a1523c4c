"""Exports hold every tensor once under its name, tied ones tied, and run nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lightning_dist.checkpoint.export import export_safetensors, load_safetensors
from lightning_dist.cli import main
from lightning_dist.errors import CheckpointError
from tests.distributed.sharded_runs import TiedNet


def saved(path: Path, state: dict[str, object]) -> Path:
    torch.save({"state_dict": state, "global_step": 3}, path)
    return path


def test_a_model_comes_back_as_it_was_with_its_ties(tmp_path: Path) -> None:
    net = TiedNet()
    checkpoint = saved(tmp_path / "a.ckpt", {f"net.{name}": value for name, value in net.state_dict().items()})
    output = tmp_path / "a.safetensors"
    assert main(["checkpoint", "export", str(checkpoint), str(output), "--prefix", "net."]) == 0
    state = load_safetensors(output)
    assert state.keys() == net.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    assert len(load_file(output)) == len(state) - 1, "any reader of the format finds each tensor, once"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "a.safetensors"]


def test_views_and_strides_become_plain(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    checkpoint = saved(tmp_path / "a.ckpt", {"t": whole.t(), "row": whole[1], "empty": torch.empty(0), "count": 7})
    exported = export_safetensors(checkpoint, tmp_path / "b")
    assert exported.names == ("t", "row", "empty")
    assert exported.tied == {}
    state = load_file(tmp_path / "b")
    assert torch.equal(state["t"], whole.t())
    assert torch.equal(state["row"], whole[1])


class Hostile:
    def __reduce__(self) -> tuple[object, ...]:
        return (exec, ("raise SystemExit('was run')",))


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "b.safetensors"
    torn = tmp_path / "torn.ckpt"
    torn.write_bytes(saved(tmp_path / "a.ckpt", {"w": torch.ones(100)}).read_bytes()[:200])
    torch.save({"state_dict": {"w": torch.ones(1)}, "hyper_parameters": Hostile()}, tmp_path / "hostile.ckpt")
    torch.save([1], tmp_path / "list.ckpt")
    for name, said in {
        "missing.ckpt": "cannot be read",
        "torn.ckpt": "cannot be read",
        "hostile.ckpt": "weights_only=True",
        "list.ckpt": "no state_dict",
    }.items():
        with pytest.raises(CheckpointError, match=said):
            export_safetensors(tmp_path / name, output)
        assert main(["checkpoint", "export", str(tmp_path / name), str(output)]) == 2
        assert said in capsys.readouterr().err
        assert not output.exists()
    with pytest.raises(CheckpointError, match=r"begin with 'x\.'; they are w"):
        export_safetensors(tmp_path / "a.ckpt", output, prefix="x.")
    with pytest.raises(CheckpointError, match="safetensors file"):
        load_safetensors(torn)
