"""Checkpoints and training data on an S3 server, on the loopback interface."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'lightning-dist[s3]'")
pytest.importorskip("moto", reason="moto, the S3 server of these tests, is not installed")

from lightning_dist import AsyncShardedCheckpoint
from lightning_dist.checkpoint import catalog, leases
from lightning_dist.checkpoint.sharded import load, save
from lightning_dist.checkpoint.storage import Folder, open_folder
from lightning_dist.cli import main
from lightning_dist.data.cache.cached_chunks import CacheOptions, open_chunks
from lightning_dist.data.storage.shards import open_read_folder
from lightning_dist.errors import CheckpointError, StorageError
from lightning_dist.retry import Retry
from tests.distributed.lightning_runs import strategy_of, trainer_on_pool
from tests.distributed.pipeline_runs import StageCase, StageLearner
from tests.support.object_store import CALL, object_store
from tests.support.ranks import RankPool
from tests.support.saves import every_type, same, zeros_like
from tests.support.stored import StoredFolder, read_chunk, store, stored_chunk
from tests.support.tasks import RankContext


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server in a process of its own."""
    with object_store() as address:
        yield address


def bucket(address: str, name: str, **options: Any) -> Folder:
    import s3fs

    file_system = s3fs.S3FileSystem(endpoint_url=address)
    if not file_system.exists(name):
        file_system.mkdir(name)
    return open_folder(f"s3://{name}/runs/a", storage_options={"endpoint_url": address}, **options)


def save_and_load(context: RankContext, address: str) -> list[str]:
    root = bucket(address, "whole") if context.rank == 0 else None
    torch.distributed.barrier()
    root = root if root is not None else bucket(address, "whole")
    large = torch.arange(3 << 20, dtype=torch.float32)  # more than one part of an upload
    state = {**every_type(), "large": large, "loops": {"step": 4}}
    folder = root.child("step4")
    for _ in range(2):  # the second replaces the first
        save({**state}, folder, rank=context.rank, host="h", record={"step": 4}, chunk_bytes=1 << 20)
    target = zeros_like(state)
    load(target, folder)
    problems = [k for k, v in state.items() if isinstance(v, torch.Tensor) and not same(v, target[k])]
    torch.distributed.barrier()
    if context.rank == 0:
        found = catalog.newest(root, full=True)
        problems += [] if found is not None and found.folder.url == "s3://whole/runs/a/step4" else ["newest"]
        problems += [] if len(folder.list()) == 4 else [str(folder.list())]
    return problems


def test_two_ranks_save_and_load(ranks: RankPool, server: str) -> None:
    assert ranks.run(save_and_load, world_size=2, args=(server,), deadline_s=100, **CALL) == [[], []]


def operations(context: RankContext, address: str) -> None:
    root = bucket(address, "operations")
    assert root.list() == {}
    assert root.read("x") is None
    root.remove("x")
    folder = root.child("c")
    save({"w": torch.ones(100)}, folder, rank=0, host="h", record={"step": 1})
    assert root.list() == {"c": None}
    with leases.leased(folder, host="h"):
        assert len(leases.readers(folder)) == 1
    option = ["--option", f"endpoint_url={address}"]
    assert main(["checkpoint", "verify", "s3://operations/runs/a/c", *option]) == 0
    folder.remove("COMMITTED")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert catalog.newest(root) is None
    assert "s3://operations/runs/a/c has no COMMITTED" in str(warned[-1].message)
    catalog.delete(root, "c")
    assert root.list() == {}


def test_the_operations_of_a_folder(ranks: RankPool, server: str) -> None:
    ranks.run(operations, world_size=1, args=(server,), init_group=False, **CALL)


def failures(context: RankContext, address: str) -> tuple[list[float], list[str]]:
    """Answers of a busy server pass; a bucket that is not there, and a server that is not, do not."""
    import s3fs

    waits: list[float] = []
    folder = bucket(address, "failures", retry=Retry(sleep=waits.append))
    true_call, busy = s3fs.S3FileSystem.call_s3, [2]

    def call_s3(self: Any, method: str, *arguments: Any, **options: Any) -> Any:
        if method == "put_object" and busy[0]:
            busy[0] -= 1
            error = OSError("[Errno 16] Please reduce your request rate.")
            error.__cause__ = _busy()
            raise error
        return true_call(self, method, *arguments, **options)

    s3fs.S3FileSystem.call_s3 = call_s3
    folder.write("x", [b"abc", b"def"])
    s3fs.S3FileSystem.call_s3 = true_call
    assert folder.read("x") == b"abcdef"
    said = []
    missing = open_folder("s3://nobody-made-this/a", storage_options={"endpoint_url": address})
    try:
        missing.write("x", [b"1"])
    except StorageError as error:
        said.append(str(error))
    return waits, said


def _busy() -> Exception:
    from botocore.exceptions import ClientError

    answer = {"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": 503}}
    return ClientError(answer, "PutObject")  # type: ignore[arg-type]


def test_a_busy_server_is_asked_again_and_a_missing_bucket_named(ranks: RankPool, server: str) -> None:
    waits, said = ranks.run(failures, world_size=1, args=(server,), init_group=False, **CALL)[0]
    assert waits == [0.5, 1.0]
    assert len(said) == 1
    assert "cannot write s3://nobody-made-this/a/x" in said[0]


def train_and_resume(context: RankContext, address: str) -> list[Any]:
    """An epoch saved to S3 by the Trainer, and the next one from there and from a file."""
    import s3fs

    if context.rank == 0:
        s3fs.S3FileSystem(endpoint_url=address).mkdir("runs")
    torch.distributed.barrier()
    common: dict[str, Any] = {"limit_train_batches": 2, "limit_val_batches": 0, "enable_checkpointing": True}
    seen = []
    for folder in ("s3://runs/a", str(context.tmp_path / "a")):
        keep = AsyncShardedCheckpoint(folder, save_top_k=1, save_last=True)
        strategy = strategy_of(parallel="zero2")
        trainer_on_pool(context, strategy, callbacks=[keep], max_epochs=1, **common).fit(StageLearner(StageCase()))
        resumed = StageLearner(StageCase())
        on = trainer_on_pool(context, strategy_of(), callbacks=[AsyncShardedCheckpoint(folder)], max_epochs=2, **common)
        on.fit(resumed, ckpt_path=f"{folder}/last.ckpt")
        seen.append((resumed.seen, on.global_step))
    return seen


def test_a_trainer_saves_there_and_resumes(ranks: RankPool, server: str) -> None:
    call = {**CALL, "env": {**CALL["env"], "AWS_ENDPOINT_URL": server}}
    for there, here in ranks.run(train_and_resume, world_size=2, args=(server,), deadline_s=100, **call):
        assert there == here
        assert there[1] == 4


ENDS = {
    "denied": lambda: PermissionError("Access Denied"),  # as the client translates it
    "busy": lambda: _raised_from(OSError("[Errno 16] Please reduce your request rate."), _busy()),
}


def _raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def lose_the_store(context: RankContext, address: str, kind: str) -> tuple[str, list[str], int]:
    """The server takes nothing for the second checkpoint, and never will: how the run ends, what is there and loads."""
    import s3fs

    folder, true_call = f"s3://lost-{kind}/a", s3fs.S3FileSystem.call_s3
    if context.rank == 0:
        s3fs.S3FileSystem(endpoint_url=address).mkdir(f"lost-{kind}")
    torch.distributed.barrier()

    def call_s3(self: Any, method: str, *arguments: Any, **options: Any) -> Any:
        if method == "put_object" and "step=2.ckpt" in str(options.get("Key")):
            raise ENDS[kind]()
        return true_call(self, method, *arguments, **options)

    def trainer(*callbacks: Any, epochs: int) -> Any:
        settings: dict[str, Any] = {"limit_train_batches": 3, "limit_val_batches": 0, "max_epochs": epochs}
        strategy = strategy_of(parallel="zero2", checkpoint="async_sharded")
        return trainer_on_pool(
            context, strategy, callbacks=list(callbacks), enable_checkpointing=bool(callbacks), **settings
        )

    keep = AsyncShardedCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    s3fs.S3FileSystem.call_s3 = call_s3
    try:
        with pytest.raises(CheckpointError) as raised:
            trainer(keep, epochs=1).fit(StageLearner(StageCase()))
    finally:
        s3fs.S3FileSystem.call_s3 = true_call
    whole = sorted(entry.name for entry in catalog.survey(open_folder(folder), full=True) if entry.problem is None)
    on = trainer(epochs=2)
    on.fit(StageLearner(StageCase()), ckpt_path=f"{folder}/step=1.ckpt")
    return str(raised.value), whole, on.global_step


@pytest.mark.parametrize("kind", ["denied", pytest.param("busy", marks=pytest.mark.sweep)])
def test_a_store_that_refuses_for_good_ends_all_ranks(ranks: RankPool, server: str, kind: str) -> None:
    call = {**CALL, "env": {**CALL["env"], "AWS_ENDPOINT_URL": server}}
    for said, whole, step in ranks.run(lose_the_store, world_size=2, args=(server, kind), deadline_s=100, **call):
        assert said.startswith(f"saving s3://lost-{kind}/a/step=2.ckpt"), said
        assert {"denied": "Access Denied", "busy": "reduce your request rate"}[kind] in said
        assert whole == ["step=1.ckpt"]
        assert step > 3, "the run went on"


def read_data(context: RankContext, address: str) -> tuple[float, float]:
    """Shards of which each rank reads all, also in a child that is forked once the client is in use."""
    import s3fs

    index = store(context.tmp_path / f"data{context.rank}", num_shards=2, chunks_per_shard=3, chunk_bytes=50_000)
    local = StoredFolder(context.tmp_path / f"data{context.rank}", context.tmp_path / "log")
    if context.rank == 0:
        file_system = s3fs.S3FileSystem(endpoint_url=address)
        file_system.mkdir("data")
        for name in index.shards:
            file_system.put_file(str(local.folder / name), f"data/set/{name}")
    torch.distributed.barrier()
    folder = open_read_folder("s3://data/set", storage_options={"endpoint_url": address})
    assert folder.sizes() == {"0.bin": 150_000, "1.bin": 150_000}
    assert folder.read("index.json") is None
    counts = {"data.shared_bytes": 0.0, "data.cache_bytes": 0.0}

    def count(name: str, value: float) -> None:
        counts[name] = counts.get(name, 0.0) + value

    chunks = open_chunks(folder, index, options=CacheOptions(folder=context.tmp_path / "cache"), count=count)
    for number in range(3):
        assert read_chunk(chunks, index, number) == stored_chunk(local.folder, index, number)
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            assert read_chunk(chunks, index, 5) == stored_chunk(local.folder, index, 5)
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    for number in range(3, 6):
        assert read_chunk(chunks, index, number) == stored_chunk(local.folder, index, number)
    chunks.close()
    return counts["data.shared_bytes"], counts["data.cache_bytes"]


def test_training_data_come_once_a_host(ranks: RankPool, server: str) -> None:
    shares = ranks.run(read_data, world_size=2, args=(server,), deadline_s=100, **CALL)
    assert sum(shared for shared, _ in shares) == 250_000  # the sixth chunk by one of the children
    assert sum(map(sum, shares)) == 600_000
