"""examples/train.py as a user runs it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.fresh import Command, FreshRanks, run_script
from tests.support.processes import REPO_ROOT, free_port

TRAIN = REPO_ROOT / "examples" / "train.py"
SHORT = [
    "model=gpt-tiny",
    "trainer=debug",
    "trainer.devices=2",
    "trainer.logger=true",
    "sample_bytes=8",
    "name=t",
]
DEADLINE_S = 180


def train(*overrides: str, cwd: Path) -> Any:
    return run_script([TRAIN, *SHORT, *overrides], cwd=cwd, deadline_s=DEADLINE_S, env={"COLUMNS": "200"})


def outputs(cwd: Path) -> Path:
    (folder,) = (cwd / "outputs" / "t").iterdir()
    return folder


def test_it_trains_reports_and_writes(tmp_path: Path) -> None:
    result = train("checkpoint=full", "checkpoint.every_n_steps=1", cwd=tmp_path).check()
    for name in ("training loss", "validation loss", "bits per byte, validation", "samples/s", "parameters"):
        assert result.stdout.count(name) == 1, name  # rank 0 only
    assert re.search(r"steps\s*│\s*3 ", result.stdout)
    assert re.search(r"ranks\s*│\s*2 ", result.stdout)
    folder = outputs(tmp_path)
    assert str(folder) in result.stdout
    assert list((folder / "tensorboard").glob("events.*"))
    assert (folder / "sample.txt").read_text(encoding="utf-8").startswith("The ")
    assert (folder / "checkpoints" / "last.ckpt").is_file()

    more = train("trainer.max_steps=5", f"ckpt_path={folder}/checkpoints/last.ckpt", "name=more", cwd=tmp_path).check()
    assert re.search(r"steps\s*│\s*5 ", more.stdout)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["data=naive", "sync=flat"], marks=pytest.mark.sweep),
        ["data=synthetic", "sync=bf16"],
        pytest.param(["model=mlp", "model.n_features=8", "data=synthetic"], marks=pytest.mark.sweep),
    ],
    ids=lambda overrides: overrides[0],
)
def test_other_groups(overrides: list[str], tmp_path: Path) -> None:
    result = train("checkpoint=off", *overrides, cwd=tmp_path).check()
    assert "validation loss" in result.stdout


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["parallel=zero1"], marks=pytest.mark.sweep),
        pytest.param(["parallel=zero2", "trainer.accumulate_grad_batches=2"], marks=pytest.mark.sweep),
        ["parallel=zero3", "parallel.secondary_shard=host", "trainer.precision=bf16-mixed"],
        pytest.param(["parallel=hsdp"], marks=pytest.mark.sweep),
    ],
    ids=lambda overrides: overrides[0],
)
def test_every_way_to_spread_the_model(overrides: list[str], tmp_path: Path) -> None:
    result = train(*overrides, cwd=tmp_path).check()
    assert "2 shards" in result.stderr + result.stdout
    assert re.search(r"ranks\s*│\s*2 ", result.stdout)
    assert "Sample" in result.stdout, "the model is whole again on rank 0"


def test_layers_dealt_to_ranks(tmp_path: Path) -> None:
    result = train("parallel=pipeline", "parallel.pipeline.schedule=interleaved_1f1b", cwd=tmp_path).check()
    assert "1 pipeline of 2 ranks, schedule interleaved_1f1b" in result.stderr + result.stdout
    assert "Sample" in result.stdout, "the model is whole again on rank 0"
    assert len(list(tmp_path.rglob("pipeline.html"))) == 1


def test_layers_of_an_mlp_dealt_to_ranks(tmp_path: Path) -> None:
    result = train("parallel=pipeline", "model=mlp", "data=synthetic", cwd=tmp_path).check()
    assert "1 pipeline of 2 ranks, schedule 1f1b" in result.stderr + result.stdout


def test_layers_dealt_to_ranks_that_share_them(tmp_path: Path) -> None:
    overrides = ["parallel=pipeline", "parallel.tensor.size=2", "parallel.tensor.loss_parallel=true"]
    result = train(*overrides, "trainer.devices=4", cwd=tmp_path).check()
    said = result.stderr + result.stdout
    assert "in each stage tensor parallel over 2 ranks, plan gpt" in said
    assert "stage 1 on rank 2, 3" in said
    assert "Sample" in result.stdout, "the model is whole again on rank 0"


def test_layers_shared_by_the_ranks_of_a_host(tmp_path: Path) -> None:
    result = train("parallel=tensor", "parallel.tensor.loss_parallel=true", "data=sharded", cwd=tmp_path).check()
    said = result.stderr + result.stdout
    assert "tensor parallel over 2 ranks, plan gpt" in said
    assert "all read the same data" in said
    assert re.search(r"ranks\s*│\s*2 ", result.stdout)
    assert "Sample" in result.stdout, "the model is whole again on rank 0"


def test_text_of_ones_own(tmp_path: Path) -> None:
    texts = tmp_path / "my texts"
    texts.mkdir()
    (texts / "a.txt").write_bytes(b"hello world, " * 300)
    (texts / "b.txt").write_bytes(b"again and again; " * 300)
    train("checkpoint=off", f"data.path='{texts}'", cwd=tmp_path).check()


def test_under_torchrun(tmp_path: Path) -> None:
    argv = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", TRAIN, *SHORT]
    result = run_script([*argv, "checkpoint=off"], cwd=tmp_path, deadline_s=DEADLINE_S).check()
    assert result.stdout.count("samples/s") == 1


def test_two_nodes(tmp_path: Path) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    argv = [TRAIN, *SHORT, "checkpoint=off", "trainer.devices=1", "trainer.num_nodes=2"]
    with FreshRanks(Command(argv, {**meeting, "NODE_RANK": str(node)}, cwd=tmp_path) for node in range(2)) as nodes:
        results = nodes.wait(deadline_s=DEADLINE_S)
    assert [result.check().stdout.count("samples/s") for result in results] == [1, 0]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model=gpt-huge", ["gpt-huge", "gpt-small", "gpt-tiny", "mlp"]),
        pytest.param("sync=fast", ["fast", "bf16", "flat", "hierarchical"], marks=pytest.mark.sweep),
        ("trainer.devicse=2", ["trainer.devicse is unknown", "devices"]),
        pytest.param("sync.bucket_bytes=1", ["=1 bytes", "at least 1024 bytes"], marks=pytest.mark.sweep),
        ("data.path=/nowhere", ["data.path=/nowhere is neither a file nor a folder"]),
        ("ckpt_path=/nowhere.ckpt", ["ckpt_path=/nowhere.ckpt does not exist"]),
        pytest.param("data.batch_size=1000000", ["the text has", "lower data.batch_size"], marks=pytest.mark.sweep),
    ],
)
def test_a_mistake_is_named_before_any_process_starts(override: str, says: list[str], tmp_path: Path) -> None:
    result = train(override, cwd=tmp_path)
    assert result.returncode == 1
    assert "Traceback" not in result.output
    assert "Initializing distributed" not in result.output
    for text in says:
        assert text in result.stderr


def test_the_plain_script(tmp_path: Path) -> None:
    result = run_script([REPO_ROOT / "examples" / "plain_script.py"], cwd=tmp_path, deadline_s=DEADLINE_S).check()
    assert sorted(re.findall(r"rank \d of \d", result.stdout)) == ["rank 0 of 2", "rank 1 of 2"]
