"""How long a training step waits for its batch: the example's GPT, with storage that sends twice what training reads.

Samples have 64 KB, of which the model takes the first tokens: so much data a second is read as by a larger model on a
faster machine, and the rate is one that a link can be set to. First the steps are timed with data on disk; the store's
link is then given twice the rate that these steps read at. The first batches, until each lane was read from, come as
fast as the link brings the first chunk of each lane, and are told apart.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.data.peers import quiet
from benchmarks.data.scenarios import DataSets, scratch
from examples.model import Learner
from lightning_dist import HierDistStrategy
from lightning_dist.config import DataConfig
from lightning_dist.data.formats.tokens import TokensFormat
from lightning_dist.data.loading.loader import ShardedLoader
from lightning_dist.data.loading.source import Source
from lightning_dist.run_config import AdamWConfig, GPTConfig
from tests.distributed.lightning_runs import trainer_on_pool
from tests.support.cluster import NamespaceCluster
from tests.support.http_store import HttpStore
from tests.support.tasks import RankContext

PLACEMENT = {"a": [0, 1], "b": [2, 3]}
STORE_HOST = "c"
WORKERS = {"hierdist": 0, "hierdist threads": 2}
SEQ_LEN = 16384
CHUNK_BYTES = 8 * 4 * SEQ_LEN
BATCH_SIZE = 4
LANES = 24
FIRST = -(-LANES // (4 * BATCH_SIZE)) + 1


@dataclass(frozen=True)
class Waited:
    """What a rank saw, in seconds.

    Attributes:
        waits: For each batch.
        steps: From one batch given to the next.
    """

    waits: list[float]
    steps: list[float]

    @property
    def start_s(self) -> float:
        """Waited for the first batches."""
        return sum(self.waits[:FIRST])

    @property
    def part(self) -> float:
        """Waited for the others, over the time of their steps."""
        return sum(self.waits[FIRST:]) / sum(self.steps[FIRST - 1 :])


class _Timed:
    """A loader, whose batches are waited for by the clock."""

    def __init__(self, loader: ShardedLoader, num_batches: int) -> None:
        self.loader = loader
        self.given_s: list[float] = []
        self.waits: list[float] = []
        self._num_batches = num_batches

    def __len__(self) -> int:
        return min(self._num_batches, len(self.loader))

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        for _ in range(len(self)):
            asked_s = time.monotonic()
            batch = next(batches)
            self.given_s.append(time.monotonic())
            self.waits.append(self.given_s[-1] - asked_s)
            yield batch
        self.loader.close()


def cut(tokens: torch.Tensor, *, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a sample, as many as the model takes and of its vocabulary."""
    part = tokens[: length + 1] % 256
    return part[:-1], part[1:]


def train(context: RankContext, url: str, cache: str, workers: int, steps: int) -> Waited:
    """Train on this rank."""
    quiet()
    model = GPTConfig()
    config = DataConfig(
        batch_size=BATCH_SIZE, workers=workers, lanes=LANES, shuffle_block=1, cache_dir=f"{cache}/{context.host}"
    )
    strategy = HierDistStrategy(sync={"timeout_s": 120.0})
    loader = ShardedLoader(
        Source(url, format=TokensFormat(seq_len=SEQ_LEN)),
        config=config,
        transform=partial(cut, length=model.block_size),
    )
    timed = _Timed(loader, steps)
    trainer = trainer_on_pool(context, strategy, callbacks=[_Places(loader)], max_steps=steps)
    trainer.fit(Learner(model, AdamWConfig(), max_steps=steps), timed)
    given = timed.given_s
    return Waited(timed.waits, [late - early for early, late in itertools.pairwise(given)])


class _Places(pl.Callback):
    """The strategy tells a loader who reads; it does not see this one inside of another."""

    def __init__(self, loader: ShardedLoader) -> None:
        self._loader = loader

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        trainer.strategy.process_dataloader(self._loader)


def run_waiting(
    data: DataSets, *, arms: Sequence[str], rounds: int, steps: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """All rounds: seconds a step, and the part of it that was waited, with each number of workers."""
    folder, _ = data.get("hierdist")
    seen: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    with ExitStack() as stack:
        cluster = stack.enter_context(NamespaceCluster(len(PLACEMENT) + 1))
        pool = stack.enter_context(cluster.pool(PLACEMENT))
        store = stack.enter_context(HttpStore(data.root, host=cluster[STORE_HOST]))

        def run(url: str, workers: int) -> dict[str, float]:
            with scratch(PLACEMENT) as cache:
                ranks = pool.run(
                    train, args=(url, str(cache), workers, steps), deadline_s=300.0, fresh=True, env=store.s3_variables
                )
            return summary(ranks)

        for number in range(rounds):
            for arm in arms:
                workers = WORKERS[arm]
                cluster[STORE_HOST].set_rate(None)
                local = run(str(folder), workers)
                needed = sum(map(len, PLACEMENT.values())) * BATCH_SIZE * 4 * SEQ_LEN / local["step_s"]
                cluster[STORE_HOST].set_rate(2 * needed * 8 / 1e6)
                stored = run(f"s3://data/{folder.name}", workers)
                row = {**stored, "needed_bytes_per_s": needed, "step_from_disk_s": local["step_s"]}
                seen[arm].append(row)
                say(f"  round {number + 1}/{rounds} {arm}: " + ", ".join(f"{k} {v:.4g}" for k, v in row.items()))
    medians = {arm: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for arm, rows in seen.items()}
    return {"steps": steps, "arms": medians, "rounds": seen}


def summary(ranks: Sequence[Waited]) -> dict[str, float]:
    """Of the rank that waited longest."""
    worst = max(ranks, key=lambda rank: rank.part)
    return {
        "step_s": statistics.median(worst.steps),
        "wait_over_step": worst.part,
        "longest_wait_s": max(worst.waits[FIRST:]),
        "first_batches_s": max(rank.start_s for rank in ranks),
    }
