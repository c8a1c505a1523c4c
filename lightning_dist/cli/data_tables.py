"""Data sets as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.table import Table

from lightning_dist.checkpoint.tables import size_text
from lightning_dist.data.index.dataset_index import DatasetIndex


def of_dataset(url: str, indexes: Iterable[DatasetIndex]) -> Table:
    """What indexes say of a folder; a column each."""
    shown = list(indexes)
    table = Table(title=url, title_justify="left", show_header=False)
    for row, text in _ROWS.items():
        values = [text(index) for index in shown]
        if any(values):
            table.add_row(row, *values)
    return table


def _property(name: str) -> Callable[[DatasetIndex], str]:
    def text(index: DatasetIndex) -> str:
        value = index.properties.get(name)
        return "" if value is None else f"{value:,}" if isinstance(value, int) and name != "eos" else str(value)

    return text


def _size(index: DatasetIndex) -> str:
    mean = index.size_bytes // index.num_chunks if index.num_chunks else 0
    return f"{size_text(index.size_bytes)} ({size_text(mean)} a chunk)"


def _tokens(index: DatasetIndex) -> str:
    properties = index.properties
    total = properties.get("tokens", sum(properties.get("shard_tokens", ())))
    if not total:
        return ""
    return f"{total:,} ({_share(properties, total, index.num_samples)})"


def _share(properties: Mapping[str, Any], tokens: int, samples: int) -> str:
    positions = samples * int(properties["seq_len"])
    if "shard_tokens" in properties:
        left = tokens - positions - len(properties["shard_tokens"])
        return f"{max(0, left):,} in no sample"
    return f"{1 - tokens / positions:.2%} of positions are padding" if positions else "no rows"


def _checksums(index: DatasetIndex) -> str:
    return "none" if index.crc32 is None else "CRC-32 of each chunk"


_ROWS: dict[str, Callable[[DatasetIndex], str]] = {
    "format": lambda index: index.format,
    "shards": lambda index: f"{len(index.shards):,}",
    "chunks": lambda index: f"{index.num_chunks:,}",
    "samples": lambda index: f"{index.num_samples:,}",
    "size": _size,
    "checksums": _checksums,
    "sequence length": _property("seq_len"),
    "tokens": _tokens,
    "type of tokens": _property("dtype"),
    "vocabulary": _property("vocab_size"),
    "tokenizer": _property("tokenizer"),
    "token that ends documents": _property("eos"),
    "fingerprint": lambda index: index.fingerprint,
}
