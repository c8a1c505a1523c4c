"""How long ranks wait for a checkpoint: from storage, each for itself or once per host, and from memory.

    python -m benchmarks.resume --rounds 3
    python -m benchmarks.resume --parameters 20e6 --rate-mb 100 --ranks-per-host 4

Two hosts, which are labels on this machine; the ranks of each read storage at so many megabytes a second together, as
over one link. AdamW, so 12 bytes of state a parameter. ``load`` is what the slowest rank waited in the two calls that
read; ``read`` is what all ranks of the first host read from storage. Memory is that of a keeper beside the ranks, which
is not limited. Arms take turns. Results go to ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoint import WIDTH, Blocks
from benchmarks.ending import clean_up_when_terminated
from benchmarks.record import RESULTS, commit, today
from lightning_dist import build
from lightning_dist.checkpoint.keeper import client
from lightning_dist.checkpoint.local_disk import LocalFolder
from tests.distributed.lightning_runs import loader_of, strategy_of, trainer_on_pool
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

ARMS = ("each_rank", "once_per_host", "memory")
HOSTS = ("a", "b")
_TIME = struct.Struct("d")


class Link:
    """What the processes of a host share: so many bytes a second.

    Args:
        path: A file that they share.
        bytes_per_s: The limit.
    """

    def __init__(self, path: Path, bytes_per_s: float) -> None:
        self._path = path
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self.taken_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Wait until so many bytes have passed."""
        with self._lock, open(self._path, "a+b") as file:
            self.taken_bytes += size_bytes
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            data = file.read()
            free_s = max(_TIME.unpack(data)[0] if data else 0.0, time.monotonic()) + size_bytes / self._bytes_per_s
            file.truncate(0)
            file.write(_TIME.pack(free_s))
        time.sleep(max(0.0, free_s - time.monotonic()))


class Interrupted(Exception):
    """Training ends here."""


class SaveAndFail(pl.Callback):
    """Saves after the first step, and fails, so that what is in memory stays there."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)
        trainer.strategy._saver.finish()
        raise Interrupted


def save(context: RankContext, path: str, parallel: str, parameters: float) -> None:
    """Leave a checkpoint in storage and in memory."""
    checkpoint = {"mode": "sharded", "replica": "memory", "replica_limit": "16GB"}
    strategy = strategy_of(parallel=parallel, checkpoint=checkpoint, sync={"timeout_s": 300.0})
    trainer = trainer_on_pool(context, strategy, callbacks=[SaveAndFail(path)], max_steps=1, max_epochs=-1)
    with contextlib.suppress(Interrupted):
        trainer.fit(Blocks(parameters), loader_of([_batch()]))


def resume(context: RankContext, arm: str, path: str, parallel: str, parameters: float, rate: float) -> list[float]:
    """Seconds that this rank waited for the checkpoint, and the bytes that it read from storage."""
    checkpoint = {"mode": "sharded", "replica": "memory" if arm == "memory" else "off"}
    strategy = strategy_of(parallel=parallel, checkpoint=checkpoint, sync={"timeout_s": 300.0})
    link, waited_s = Link(Path(path).parent / f"link-{context.host}", rate), 0.0
    read_into = LocalFolder.read_into

    def limited(self: LocalFolder, name: str, start: int, target: memoryview) -> None:
        link.take(len(target))
        read_into(self, name, start, target)

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            nonlocal waited_s
            context.barrier()
            start_s = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                waited_s += time.perf_counter() - start_s

        return run

    @contextlib.contextmanager
    def alone(*_: Any) -> Iterator[None]:
        yield None

    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(LocalFolder, "read_into", limited))
        if arm == "each_rank":
            patches.enter_context(patch.object(build, "open_host_reading", alone))
        for name in ("load_checkpoint", "load_optimizer_state_dict"):
            patches.enter_context(patch.object(strategy, name, timed(getattr(strategy, name))))
        trainer = trainer_on_pool(context, strategy, max_steps=1, max_epochs=-1)
        trainer.fit(Blocks(parameters), loader_of([_batch()]), ckpt_path=path)
    return [waited_s, float(link.taken_bytes)]


def _batch() -> torch.Tensor:
    return torch.ones(2, WIDTH)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the arms in turn and write what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parameters", type=float, default=20e6)
    parser.add_argument("--parallel", default="ddp", help="mode of the runs, e.g. zero2")
    parser.add_argument("--rate-mb", type=float, default=100.0, help="what a host reads from storage, MB/s")
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--folder", type=Path, help="where to write the checkpoint (default: a temporary folder)")
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/<date>-resume.json")
    arguments = parser.parse_args(argv)
    count = arguments.ranks_per_host
    layout = {host: list(range(number * count, (number + 1) * count)) for number, host in enumerate(HOSTS)}
    common = (arguments.parallel, arguments.parameters)
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    path = folder / "1.ckpt"
    seen: dict[str, list[dict[str, float]]] = {arm: [] for arm in arguments.arms}
    try:
        with RankPool() as pool:
            pool.run(save, layout=layout, args=(str(path), *common), deadline_s=300)
            size_bytes = sum(file.stat().st_size for file in path.iterdir())
            for number in range(arguments.rounds):
                for arm in arguments.arms:
                    rate = arguments.rate_mb * 1e6
                    ranks = pool.run(resume, layout=layout, args=(arm, str(path), *common, rate), deadline_s=300)
                    read_bytes = sum(read for _, read in ranks[:count])
                    seen[arm].append({"load_s": max(waited for waited, _ in ranks), "read_bytes": read_bytes})
                    print(number, arm, seen[arm][-1], flush=True)
    finally:
        keeper = client.find(client.name_of(os.path.abspath(folder)))
        if keeper is not None:
            keeper.end()
        shutil.rmtree(folder)
    medians = {
        arm: {key: statistics.median(r[key] for r in rounds) for key in rounds[0]} for arm, rounds in seen.items()
    }
    document = {
        "date": today(),
        "commit": commit(),
        "command": " ".join(["python -m benchmarks.resume", *(sys.argv[1:] if argv is None else argv)]),
        "parameters": arguments.parameters,
        "checkpoint_bytes": size_bytes,
        "hosts": layout,
        "rate_mb_per_s": arguments.rate_mb,
        "rounds": seen,
        "medians": medians,
    }
    output = arguments.output or RESULTS / f"{today()}-resume.json"
    output.write_text(json.dumps(document, indent=1) + "\n")
    table = Table("arm", "load, s", "read by a host, of the checkpoint")
    for arm, median in medians.items():
        table.add_row(arm, f"{median['load_s']:.2f}", f"{median['read_bytes'] / size_bytes:.2f}")
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    clean_up_when_terminated()
    raise SystemExit(main())
