"""What a rank leaves for its agent when it fails: its error, and the operation between ranks that it was in.

A file in the agent's folder, ``words.<local rank>.json``; the agent reads it once the rank has ended.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from lightning_dist.elastic.agent_folder import write_json

_LONGEST = 4000  # characters of an error


def leave_words(folder: Path, local_rank: int, error: str, last_collective: str | None) -> None:
    """Write them; the first a process writes are those that count. A folder that is gone has nobody who would read.

    Args:
        folder: The agent's.
        local_rank: Whose.
        error: What has happened, in words.
        last_collective: The operation between ranks that it is in, or was in last; ``None``: unknown.
    """
    path = folder / f"words.{local_rank}.json"
    with contextlib.suppress(OSError):
        if not path.exists():
            write_json(path, {"error": error[:_LONGEST], "last_collective": last_collective})
