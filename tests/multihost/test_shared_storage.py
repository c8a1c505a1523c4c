"""Training data from a store on a host of its own: what two hosts of two ranks read of it in an epoch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_dist import DataConfig, ShardedLoader
from lightning_dist.data.formats.tokens import TokensFormat
from lightning_dist.data.index.index_file import INDEX_NAME, index_bytes
from lightning_dist.data.order.replicas import Replicas
from lightning_dist.data.storage.shards import open_read_folder
from tests.support.cluster import NamespaceCluster
from tests.support.http_store import HttpStore
from tests.support.ranks import RankPool
from tests.support.tasks import RankContext

SEQ_LEN = 64
SAMPLES = 4800
SHARDS = 4
PLACEMENTS = {
    "one rank": {"a": [0]},
    "one host": {"a": [0, 1]},
    "in a row": {"a": [0, 1], "b": [2, 3]},
    "in turn": {"a": [0, 2], "b": [1, 3]},
    "uneven": {"a": [0, 1, 2], "b": [3]},
}


def hosts_of(placement: dict[str, list[int]]) -> tuple[int, ...]:
    hosts = {rank: number for number, ranks in enumerate(placement.values()) for rank in ranks}
    return tuple(hosts[rank] for rank in range(len(hosts)))


def read(context: RankContext, url: str, hosts: tuple[int, ...], workers: int) -> list[list[int]]:
    """First tokens of the samples of two epochs; they tell samples apart."""
    cache = context.tmp_path / f"cache{hosts[context.rank]}"
    config = DataConfig(batch_size=4, last_batch="short", cache_dir=str(cache), workers=workers, fetch_ahead="256KiB")
    loader = ShardedLoader(url, config=config)
    loader.place(Replicas(hosts, context.rank))
    epochs = [[int(first) for batch in loader for first in batch[:, 0]] for _ in range(2)]
    loader.close()
    return epochs


@pytest.mark.parametrize("name", PLACEMENTS)
def test_each_byte_comes_from_storage_once(
    make_cluster: Callable[..., NamespaceCluster], make_pool: Callable[..., RankPool], tmp_path: Path, name: str
) -> None:
    placement = PLACEMENTS[name]
    served = tmp_path / "served"
    size_bytes = write_shards(served / "bucket" / "tokens")
    cluster = make_cluster(3)
    pool = make_pool(cluster, placement)
    with HttpStore(served, host=cluster["c"]) as store:
        url = f"{store.url}/bucket/tokens"
        # The client's threads and connections outlast a call.
        epochs = pool.run(
            read, args=(url, hosts_of(placement), 2 if name == "in turn" else 0), deadline_s=100, fresh=True
        )
        counted = store.counted()
    for epoch in range(2):
        assert sorted(first for rank in epochs for first in rank[epoch]) == list(range(0, SAMPLES * SEQ_LEN, SEQ_LEN))
    # A border between the lanes of two hosts may cut a chunk, which then both read. The second epoch reads nothing.
    read_bytes = sum(size for file, size in counted.served.items() if file.endswith(".npy"))
    assert size_bytes <= read_bytes <= 1.02 * size_bytes


def write_shards(folder: Path) -> int:
    """Samples whose first tokens are multiples of their length, in chunks of a few; how many bytes these have."""
    folder.mkdir(parents=True)
    for shard in range(SHARDS):
        first = shard * SEQ_LEN * (SAMPLES // SHARDS)
        tokens = np.arange(first, first + SEQ_LEN * (SAMPLES // SHARDS) + 1, dtype=np.uint32)
        np.save(folder / f"{shard}.npy", tokens)
    index = TokensFormat(seq_len=SEQ_LEN, chunk_bytes=4096).survey(open_read_folder(folder))
    (folder / INDEX_NAME).write_bytes(index_bytes(index))
    return index.size_bytes
