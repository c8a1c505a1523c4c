"""examples/train.py as a user runs it; what differs from one run of it to another, on ready ranks."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module

from lightning_dist import TokenSettings, config_store, write_tokens
from lightning_dist.modes.whole_checkpoints import load_whole
from lightning_dist.run_config import RunConfig
from tests.support.fresh import Command, FreshRanks, run_script
from tests.support.object_store import CALL, object_store
from tests.support.processes import REPO_ROOT, clean_environment, free_port
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

TRAIN = REPO_ROOT / "examples" / "train.py"
SHORT = [
    "model=gpt-tiny",
    "trainer=debug",
    "trainer.devices=2",
    "trainer.logger=true",
    "monitor=off",
    "sample_bytes=8",
    "name=t",
]
DEADLINE_S = 180


def train(*overrides: str, cwd: Path) -> Any:
    return run_script([TRAIN, *SHORT, *overrides], cwd=cwd, deadline_s=DEADLINE_S, env={"COLUMNS": "200"})


@contextlib.contextmanager
def printing_into(path: Path) -> Iterator[None]:
    """What this process prints inside, by whatever way, goes into a file."""
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    try:
        with open(path, "wb") as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
        yield
    finally:
        sys.stdout.flush()
        for descriptor, original in zip((1, 2), kept, strict=True):
            os.dup2(original, descriptor)
            os.close(original)


def train_here(context: RankContext, run: RunConfig, folder: Path) -> str:
    """The example's training on this rank, as under torchrun; what it prints."""
    sys.path.insert(0, str(TRAIN.parent))
    try:
        import train as example
    finally:
        sys.path.pop(0)
    said = context.tmp_path / f"printed{context.rank}"
    with printing_into(said):
        example.train(run, folder)
    return said.read_text(encoding="utf-8")


def train_on_pool(ranks: RankPool, folder: Path, *overrides: str, world_size: int = 2, store: str | None = None) -> str:
    """Train in ``folder``; what rank 0 printed. What it would print once, no other rank has printed.

    ``store`` is the address of an S3 server that the ranks reach.
    """
    config_store.register()
    with initialize_config_module("lightning_dist.conf", version_base="1.3"):
        overrides = (*SHORT, *overrides, f"trainer.devices={world_size}")
        run = config_store.to_run_config(compose("train", overrides=list(overrides)))
    environment = {"COLUMNS": "200", "TORCHELASTIC_RUN_ID": "examples"}
    call: dict[str, Any] = {"env": environment}
    if store is not None:
        call = {**CALL, "env": {**CALL["env"], "AWS_ENDPOINT_URL": store, **environment}}
    said = ranks.run(train_here, world_size=world_size, args=(run, folder), deadline_s=150, **call)
    assert [text.count("samples/s") for text in said] == [1] + [0] * (world_size - 1)
    assert re.search(rf"ranks\s*│\s*{world_size} ", said[0])
    return str(said[0])


def outputs(cwd: Path) -> Path:
    (folder,) = (cwd / "outputs" / "t").iterdir()
    return folder


def test_it_trains_reports_writes_and_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    result = train("checkpoint=full", "checkpoint.every_n_steps=1", cwd=tmp_path).check()
    for name in ("training loss", "validation loss", "bits per byte, validation", "samples/s", "parameters"):
        assert result.stdout.count(name) == 1, name  # rank 0 only
    assert re.search(r"steps\s*│\s*3 ", result.stdout)
    assert re.search(r"ranks\s*│\s*2 ", result.stdout)
    folder = outputs(tmp_path)
    assert str(folder.relative_to(tmp_path)) in result.stdout
    assert list((folder / "tensorboard").glob("events.*"))
    assert (folder / "sample.txt").read_text(encoding="utf-8").startswith("The ")
    assert (folder / "checkpoints" / "last.ckpt").is_file()

    more = train_on_pool(ranks, tmp_path, "trainer.max_steps=5", f"ckpt_path={folder}/checkpoints/last.ckpt")
    assert re.search(r"steps\s*│\s*5 ", more)


@pytest.mark.parametrize(
    "overrides",
    [
        ["data=naive", "sync=flat"],
        ["data=synthetic", "sync=bf16"],
        ["model=mlp", "model.n_features=8", "data=synthetic"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_other_groups(ranks: RankPool, overrides: list[str], tmp_path: Path) -> None:
    assert "validation loss" in train_on_pool(ranks, tmp_path, "checkpoint=off", *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel=zero1"],
        ["parallel=zero2", "trainer.accumulate_grad_batches=2"],
        ["parallel=zero3", "parallel.secondary_shard=host", "trainer.precision=bf16-mixed"],
        ["parallel=hsdp"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_every_way_to_spread_the_model(ranks: RankPool, overrides: list[str], tmp_path: Path) -> None:
    said = train_on_pool(ranks, tmp_path, *overrides)
    assert "2 shards" in said
    assert "Sample" in said, "the model is whole again on rank 0"


PARALLEL = {
    "ddp": "parallel=ddp",
    "zero1": "parallel=zero1",
    "zero2": "parallel=zero2",
    "zero3": "parallel=zero3",
    "hsdp": "parallel=hsdp",
    "tensor": "parallel=tensor",
    "pipeline": "parallel=pipeline",
}
NEIGHBOURS = dict(zip(PARALLEL, [*list(PARALLEL)[1:], "ddp"], strict=True))


@pytest.mark.parametrize(
    ("first", "then"),
    sampled(
        {f"{a}-{b}": (PARALLEL[a], PARALLEL[b]) for a, b in NEIGHBOURS.items()}, always=["zero1-zero2", "pipeline-ddp"]
    ),
)
def test_it_goes_on_from_a_sharded_checkpoint_under_any_other(
    ranks: RankPool, tmp_path: Path, first: str, then: str
) -> None:
    train_on_pool(ranks, tmp_path, first, "checkpoint=async_sharded", "checkpoint.every_n_steps=1")
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert (last / "COMMITTED").is_file()
    more = train_on_pool(ranks, tmp_path / "more", then, "checkpoint=off", "trainer.max_steps=5", f"ckpt_path={last}")
    assert re.search(r"steps\s*│\s*5 ", more)


IN_S3 = sampled({name: (override,) for name, override in PARALLEL.items()}, always=["zero2"])


def make_bucket(context: RankContext) -> None:
    import s3fs

    s3fs.S3FileSystem().mkdir("runs")


@pytest.mark.parametrize("parallel", IN_S3)
def test_it_saves_to_s3_and_goes_on_from_there(ranks: RankPool, tmp_path: Path, parallel: str) -> None:
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'lightning-dist[s3]'")
    pytest.importorskip("moto", reason="moto, the S3 server of these tests, is not installed")
    saves = [parallel, "checkpoint=async_sharded", "checkpoint.every_n_steps=1", "checkpoint.folder=s3://runs/a"]
    with object_store() as address:
        call = {**CALL, "env": {**CALL["env"], "AWS_ENDPOINT_URL": address}}
        ranks.run(make_bucket, world_size=1, init_group=False, deadline_s=100, **call)
        train_on_pool(ranks, tmp_path, *saves, store=address)
        more = [parallel, "checkpoint=off", "trainer.max_steps=5", "ckpt_path=s3://runs/a/last.ckpt"]
        assert re.search(r"steps\s*│\s*5 ", train_on_pool(ranks, tmp_path / "more", *more, store=address))
    assert not (tmp_path / "checkpoints").exists()


def write_shards(context: RankContext) -> None:
    import s3fs

    s3fs.S3FileSystem().mkdir("text")
    settings = TokenSettings(seq_len=32, shard_size="64KiB", chunk_size="16KiB")
    for part in ("train", "val"):
        text = f"{part}: the quick brown fox jumps over the lazy dog. ".encode() * 4000
        assert write_tokens([text], out=f"s3://text/{part}", settings=settings).index.num_samples > 4000


def consumed(checkpoint: Path) -> int:
    """Samples that a sharded checkpoint counts as trained on, in its epoch."""
    loops = load_whole(str(checkpoint))["loops"]["fit_loop"]["state_dict"]
    (state,) = loops["combined_loader"]
    assert state["epoch"] == 0
    return int(state["consumed"])


def test_text_streams_from_shards_in_s3_and_goes_on_with_another_number_of_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'lightning-dist[s3]'")
    pytest.importorskip("moto", reason="moto, the S3 server of these tests, is not installed")
    data = ["data=sharded", "data.url=s3://text", f"data.cache_dir={tmp_path}/cache", "data.seq_len=32"]
    saves = ["checkpoint=async_sharded", "checkpoint.every_n_steps=1"]
    last = tmp_path / "checkpoints" / "last.ckpt"
    with object_store() as address:
        call = {**CALL, "env": {**CALL["env"], "AWS_ENDPOINT_URL": address}}
        ranks.run(write_shards, world_size=1, init_group=False, deadline_s=100, **call)
        train_on_pool(ranks, tmp_path, *data, *saves, "parallel=zero2", store=address)
        assert consumed(last) == 3 * 2 * 4
        more = [*data, *saves, "parallel=ddp", "trainer.max_steps=5", f"ckpt_path={last}"]
        train_on_pool(ranks, tmp_path / "more", *more, world_size=3, store=address)
        assert consumed(tmp_path / "more" / "checkpoints" / "last.ckpt") == 3 * 2 * 4 + 2 * 3 * 4


def test_layers_dealt_to_ranks(ranks: RankPool, tmp_path: Path) -> None:
    said = train_on_pool(ranks, tmp_path, "parallel=pipeline", "parallel.pipeline.schedule=interleaved_1f1b")
    assert "1 pipeline of 2 ranks, schedule interleaved_1f1b" in said
    assert "Sample" in said, "the model is whole again on rank 0"
    assert len(list(tmp_path.rglob("pipeline.html"))) == 1


def test_layers_of_an_mlp_dealt_to_ranks(ranks: RankPool, tmp_path: Path) -> None:
    said = train_on_pool(ranks, tmp_path, "parallel=pipeline", "model=mlp", "data=synthetic")
    assert "1 pipeline of 2 ranks, schedule 1f1b" in said


def test_layers_dealt_to_ranks_that_share_them(ranks: RankPool, tmp_path: Path) -> None:
    overrides = ["parallel=pipeline", "parallel.tensor.size=2", "parallel.tensor.loss_parallel=true"]
    said = train_on_pool(ranks, tmp_path, *overrides, world_size=4)
    assert "in each stage tensor parallel over 2 ranks, plan gpt" in said
    assert "stage 1 on rank 2, 3" in said
    assert "Sample" in said, "the model is whole again on rank 0"


def test_layers_shared_by_the_ranks_of_a_host(ranks: RankPool, tmp_path: Path) -> None:
    said = train_on_pool(ranks, tmp_path, "parallel=tensor", "parallel.tensor.loss_parallel=true", "data=sharded")
    assert "tensor parallel over 2 ranks, plan gpt" in said
    assert "all read the same data" in said
    assert "Sample" in said, "the model is whole again on rank 0"


def test_text_of_ones_own(ranks: RankPool, tmp_path: Path) -> None:
    texts = tmp_path / "my texts"
    texts.mkdir()
    (texts / "a.txt").write_bytes(b"hello world, " * 300)
    (texts / "b.txt").write_bytes(b"again and again; " * 300)
    train_on_pool(ranks, tmp_path, "checkpoint=off", f"data.path='{texts}'")


@pytest.mark.sweep  # any script under torchrun: tests/distributed/test_launching.py
def test_under_torchrun(tmp_path: Path) -> None:
    argv = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", TRAIN, *SHORT]
    result = run_script([*argv, "checkpoint=off"], cwd=tmp_path, deadline_s=DEADLINE_S).check()
    assert result.stdout.count("samples/s") == 1


@pytest.mark.sweep  # tests/multihost/test_example.py has real hosts, test_launching.py the smallest script
def test_two_nodes(tmp_path: Path) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    argv = [TRAIN, *SHORT, "checkpoint=off", "trainer.devices=1", "trainer.num_nodes=2"]
    with FreshRanks(Command(argv, {**meeting, "NODE_RANK": str(node)}, cwd=tmp_path) for node in range(2)) as nodes:
        results = nodes.wait(deadline_s=DEADLINE_S)
    assert [result.check().stdout.count("samples/s") for result in results] == [1, 0]


MISTAKES = {
    "model=gpt-huge": ["gpt-huge", "gpt-small", "gpt-tiny", "mlp"],
    "sync=fast": ["fast", "bf16", "flat", "hierarchical"],
    "trainer.devicse=2": ["trainer.devicse is unknown", "devices"],
    "sync.bucket_bytes=1": ["=1 bytes", "at least 1024 bytes"],
    "data.path=/nowhere": ["data.path=/nowhere is neither a file nor a folder"],
    "ckpt_path=/nowhere.ckpt": ["ckpt_path=/nowhere.ckpt does not exist"],
    "data.batch_size=1000000": ["the text has", "lower data.batch_size"],
}


def run_here(context: RankContext, overrides: list[str], folder: Path) -> tuple[Any, str]:
    """The script, run as a user runs it, but in a process that has imported torch; its exit status and what it said."""
    os.environ.clear()
    os.environ.update(clean_environment())
    os.chdir(folder)
    sys.argv = [str(TRAIN), *overrides]
    sys.path.insert(0, str(TRAIN.parent))
    said = context.tmp_path / "printed"
    status: Any = 0
    with printing_into(said):
        try:
            runpy.run_path(str(TRAIN), run_name="__main__")
        except SystemExit as end:
            status = end.code
    text = said.read_text(encoding="utf-8")
    return (1, text + status) if isinstance(status, str) else (status, text)


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_is_named_before_any_process_starts(ranks: RankPool, override: str, tmp_path: Path) -> None:
    ((status, said),) = ranks.run(
        run_here, world_size=1, args=([*SHORT, override], tmp_path), init_group=False, fresh=True
    )
    assert status == 1
    assert "Traceback" not in said
    assert "Initializing distributed" not in said
    for text in MISTAKES[override]:
        assert text in said


def test_a_mistake_ends_the_process_without_a_traceback(tmp_path: Path) -> None:
    result = train("data.path=/nowhere", cwd=tmp_path)
    assert result.returncode == 1
    assert "Traceback" not in result.output
    assert "Initializing distributed" not in result.output
    assert MISTAKES["data.path=/nowhere"][0] in result.stderr


def test_the_plain_script(tmp_path: Path) -> None:
    result = run_script([REPO_ROOT / "examples" / "plain_script.py"], cwd=tmp_path, deadline_s=DEADLINE_S).check()
    assert sorted(re.findall(r"rank \d of \d", result.stdout)) == ["rank 0 of 2", "rank 1 of 2"]
