"""Data sets whose samples tell which they are: a map-style one, and token shards on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from lightning_dist.data.formats.tokens import TokensFormat
from lightning_dist.data.storage.shards import open_read_folder

SEQ_LEN = 4


class Ids(Dataset[int]):
    """Sample i is i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def write_tokens_of(folder: Path, shards: list[int], *, chunk_windows: int = 4) -> Path:
    """Token shards with so many windows each; sample i of them all is five times i.

    Args:
        folder: Where to; made.
        shards: Windows of each file.
        chunk_windows: Windows that are fetched at once.
    """
    folder.mkdir(parents=True)
    first = 0
    for number, windows in enumerate(shards):
        values = [token for i in range(first, first + windows) for token in [i] * SEQ_LEN]
        (folder / f"shard-{number}.bin").write_bytes(
            b"".join(value.to_bytes(2, "little") for value in [*values, first + windows - 1])
        )
        first += windows
    tokens = TokensFormat(seq_len=SEQ_LEN, dtype="uint16", chunk_bytes=2 * (chunk_windows * SEQ_LEN + 1))
    index = tokens.survey(open_read_folder(folder))
    (folder / "index.json").write_text(json.dumps(index.to_json()))
    return folder


def ids_of(batch: Any) -> list[int]:
    """Which samples a batch has: of :class:`Ids`, or of token shards."""
    assert isinstance(batch, torch.Tensor)
    return (batch if batch.dim() == 1 else batch[:, 0]).tolist()  # type: ignore[no-any-return]
