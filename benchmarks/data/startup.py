"""How long it takes until the first batch, and until the first one after a resume in the middle of an epoch.

A data set of 10^9 samples in 10^5 shards, whose files are holes, so that the time is that of the index, the order and
the first samples. It is on this host's disk.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lightning_dist.config import DataConfig
from lightning_dist.data.index.dataset_index import DatasetIndex
from lightning_dist.data.index.index_file import INDEX_NAME, index_bytes
from lightning_dist.data.loading.loader import ShardedLoader
from lightning_dist.data.order.replicas import Replicas

SEQ_LEN = 128
LINKS = 10_000  # names of a file; file systems allow some 65,000
HOSTS = (0, 0, 1, 1)


def make_holes(folder: Path, *, shards: int, samples: int) -> int:
    """A data set of so many shards with so many samples each, of zeros; bytes of its index."""
    folder.mkdir()
    size = samples * SEQ_LEN + 1
    names = [f"{number:06d}.bin" for number in range(shards)]
    for number, name in enumerate(names):
        if number % LINKS == 0:
            with open(folder / name, "wb") as file:
                file.truncate(size)
        else:
            os.link(folder / names[number - number % LINKS], folder / name)
    index = DatasetIndex(
        format="tokens",
        shards=tuple(names),
        shard_of=np.arange(shards),
        starts=np.zeros(shards, dtype=np.int64),
        sizes=np.full(shards, size),
        samples=np.full(shards, samples),
        properties={
            "dtype": "uint8",
            "seq_len": SEQ_LEN,
            "chunk_bytes": size,
            "shard_tokens": [size] * shards,
            "shard_starts": [0] * shards,
        },
    )
    return (folder / INDEX_NAME).write_bytes(index_bytes(index))


def run_startup(folder: Path, *, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """All rounds, in seconds."""
    shards, samples = 100_000, 10_000
    size_bytes = make_holes(folder, shards=shards, samples=samples)
    seen: list[dict[str, float]] = []
    for number in range(rounds):
        row = _once(folder)
        seen.append(row)
        say(f"  round {number + 1}/{rounds}: " + ", ".join(f"{key} {value:.3f}" for key, value in row.items()))
    medians = {key: statistics.median(row[key] for row in seen) for key in seen[0]}
    return {"samples": shards * samples, "shards": shards, "index_bytes": size_bytes, **medians, "rounds": seen}


def _once(folder: Path) -> dict[str, float]:
    start_s = time.perf_counter()
    DatasetIndex.from_json(json.loads((folder / INDEX_NAME).read_bytes()), "")
    index_s = time.perf_counter() - start_s

    start_s = time.perf_counter()
    loader = _loader(folder)
    next(iter(loader))
    first_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    state = loader.state_dict()
    state_s = time.perf_counter() - start_s
    loader.close()

    state = json.loads(json.dumps(state))
    state["consumed"] = loader.share.order.num_samples // 2
    state["done"] = state["consumed"] // (loader.batch_size * len(HOSTS))
    start_s = time.perf_counter()
    resumed = _loader(folder)
    resumed.load_state_dict(state)
    next(iter(resumed))
    resume_s = time.perf_counter() - start_s
    resumed.close()
    return {"index_s": index_s, "first_batch_s": first_s, "first_state_s": state_s, "resume_s": resume_s}


def _loader(folder: Path) -> ShardedLoader:
    loader = ShardedLoader(str(folder), config=DataConfig(batch_size=16))
    loader.place(Replicas(HOSTS, 1))
    return loader
