"""A file of the newest checkpoint in a folder on disk is cut, as by a crash of the machine in the middle of a write."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_dist.elastic.chaos.host.refusal import Refused


def tear_newest(folder: Path, marker: str) -> str:
    """Cut the largest file of the newest committed checkpoint in half; what was done.

    Args:
        folder: That checkpoints are in.
        marker: Name of the file by which one is committed.

    Raises:
        Refused: None is committed there.
    """
    committed = [path for path in folder.glob(f"*/{marker}") if path.is_file()]
    if not committed:
        raise Refused(f"{folder} holds no committed checkpoint")
    newest = max(committed, key=lambda path: path.stat().st_mtime_ns).parent
    files = [path for path in newest.rglob("*") if path.is_file() and not path.is_symlink()]
    largest = max(files, key=lambda path: (path.stat().st_size, path.name))
    size_bytes = largest.stat().st_size
    os.truncate(largest, size_bytes // 2)
    return f"{largest} has {size_bytes // 2} of {size_bytes} bytes"
