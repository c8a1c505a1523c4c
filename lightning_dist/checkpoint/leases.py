"""Who is reading a checkpoint: a small file in its folder, so that nobody deletes it meanwhile.

A lease ends by itself after a time, because a reader that is killed removes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator

from lightning_dist.checkpoint.storage import Folder
from lightning_dist.errors import StorageError

_PREFIX = "READING-"


@contextlib.contextmanager
def leased(
    folder: Folder,
    *,
    host: str | None = None,
    duration_s: float = 3600.0,
    clock: Callable[[], float] = time.time,
) -> Iterator[None]:
    """Hold a lease on a checkpoint.

    Args:
        folder: Of the checkpoint. Where storage takes no file there is no lease: reading does not fail for want of it.
        host: Of the reader; this one by its own name, if not given.
        duration_s: After this the lease counts no more, in seconds.
        clock: Seconds since 1970.
    """
    name = f"{_PREFIX}{uuid.uuid4().hex[:12]}"
    body = {"host": host or socket.gethostname(), "pid": os.getpid(), "until_s": clock() + duration_s}
    with contextlib.suppress(StorageError):
        folder.write(name, [json.dumps(body).encode()])
    try:
        yield
    finally:
        with contextlib.suppress(StorageError):  # it ends by itself
            folder.remove(name)


def readers(folder: Folder, *, clock: Callable[[], float] = time.time) -> list[str]:
    """Who holds a lease on a checkpoint, as ``host (pid 1)``; one that has run out or cannot be read does not count."""
    found = []
    for name in folder.list():
        if not name.startswith(_PREFIX):
            continue
        data = folder.read(name)
        with contextlib.suppress(ValueError, KeyError, TypeError):
            body = json.loads(data or b"")
            if float(body["until_s"]) > clock():
                found.append(f"{body['host']} (pid {body['pid']})")
    return found


def forget(folder: Folder, *, clock: Callable[[], float] = time.time) -> None:
    """Remove leases that no longer count."""
    if readers(folder, clock=clock):
        return
    for name in folder.list():
        if name.startswith(_PREFIX):
            folder.remove(name)
