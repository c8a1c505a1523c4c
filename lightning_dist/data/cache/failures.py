"""Failures that are remembered for a short time, so that the processes of a host do not all ask storage in vain."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from lightning_dist.errors import UnreadableShardError


def note_failure(path: Path, error: UnreadableShardError) -> None:
    """Write down why a chunk could not be fetched. Its lock is held.

    Args:
        path: Of the note.
        error: What is raised.
    """
    with contextlib.suppress(OSError):  # then the others find out by themselves
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w") as file:
            file.write(f"{os.getpid()}\n{error}")


def raise_recent(path: Path, *, within_s: float) -> None:
    """Raise what a note says, if it is recent. The lock of the chunk is held.

    Args:
        path: Of the note; nothing happens if there is none.
        within_s: How old it may be, in seconds.

    Raises:
        UnreadableShardError: As it was noted.
    """
    try:
        age_s = time.time() - path.stat().st_mtime
        pid, _, text = path.read_text().partition("\n")
    except OSError:
        return
    if 0 <= age_s <= within_s and text:
        raise UnreadableShardError(
            f"{text} (found by process {pid} {age_s:.0f} s ago; not tried again within {within_s:g} s)"
        )
