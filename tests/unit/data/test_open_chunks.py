from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_dist.config import DataConfig
from lightning_dist.data.decoded import Decoded
from lightning_dist.data.formats.tokens import OpenTokens, TokensFormat
from lightning_dist.data.index.dataset_index import Chunk
from lightning_dist.data.index.index_file import INDEX_NAME, index_bytes
from lightning_dist.data.loading.loader import ShardedLoader
from lightning_dist.data.loading.source import Source
from lightning_dist.data.order.replicas import Replicas
from lightning_dist.data.reading import Place
from lightning_dist.data.storage.shards import open_read_folder

CHUNKS, SAMPLES, SEQ_LEN = 60, 16, 4


class CountingFormat(TokensFormat):
    """Counts how often each chunk is opened."""

    def open(self, place: Place, chunk: Chunk, properties: Mapping[str, Any], decoded: Decoded) -> OpenTokens:
        opened[chunk.number] += 1
        return super().open(place, chunk, properties, decoded)


opened: Counter[int] = Counter()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.arange(CHUNKS * SAMPLES * SEQ_LEN + 1, dtype=np.uint16).tofile(tmp_path / "0.bin")
    chunk_bytes = 2 * (SAMPLES * SEQ_LEN + 1)
    written = TokensFormat(seq_len=SEQ_LEN, dtype="uint16", chunk_bytes=chunk_bytes)
    index = written.survey(open_read_folder(str(tmp_path)))
    (tmp_path / INDEX_NAME).write_bytes(index_bytes(index))
    return tmp_path


@pytest.mark.parametrize("world_size", [1, 4, 5])
@pytest.mark.parametrize("shuffle_block", [8, 64])
def test_a_chunk_is_opened_once_an_epoch(folder: Path, world_size: int, shuffle_block: int) -> None:
    config = DataConfig(batch_size=3, lanes=12, shuffle_block=shuffle_block, last_batch="short")
    opened.clear()
    for replica in range(world_size):
        loader = ShardedLoader(Source(folder, format=CountingFormat()), config=config)
        loader.place(Replicas((0,) * world_size, replica))
        before = opened.copy()
        assert sum(len(batch) for batch in loader) >= CHUNKS * SAMPLES // world_size
        assert set((opened - before).values()) == {1}
    assert set(opened) == set(range(CHUNKS))
