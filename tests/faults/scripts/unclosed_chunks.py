"""Fetches ahead in a folder of a test, and ends without closing anything."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from lightning_dist.data.cache.cached_chunks import CacheOptions, open_chunks
from tests.support.stored import StoredFolder, store

folder = Path(sys.argv[1])
index = store(folder / "data", num_shards=1, chunks_per_shard=2, chunk_bytes=20_000)
storage = StoredFolder(folder / "data", folder / "log", folder / "gate")
chunks = open_chunks(storage, index, options=CacheOptions(folder=folder / "cache"))
chunks.expect([index.chunk(0), index.chunk(1)])
while len(storage.requests()) < 2:
    time.sleep(0.01)
print("bye")
