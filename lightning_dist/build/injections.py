"""What faults on purpose do to checkpoints: handed to :mod:`lightning_dist.elastic.chaos`, which knows none."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Sequence
from typing import Any

from lightning_dist.checkpoint import local_disk
from lightning_dist.checkpoint.keeper import client
from lightning_dist.checkpoint.keeper.client import Keeper
from lightning_dist.checkpoint.keeper.messages import NoKeeperError
from lightning_dist.checkpoint.manifest import MARKER_FILE
from lightning_dist.elastic.chaos.host.refusal import Refused
from lightning_dist.elastic.chaos.plan import Fault


class KeptCheckpoints:
    """See :class:`lightning_dist.elastic.chaos.on_host.Kept`."""

    marker = MARKER_FILE

    def tear(self, folder: str) -> str:
        """See ``Kept``."""
        keeper = _keeper(folder)
        for name in reversed(keeper.folders()):
            files = keeper.list(name)
            if MARKER_FILE not in files:
                continue  # it is being written
            largest = max(files, key=lambda file: (files[file], file))
            data = keeper.read(name, largest)
            if data is not None:
                keeper.write(name, largest, [data[: len(data) // 2]])
                return f"{largest} of {name} has {len(data) // 2} of {len(data)} bytes in {keeper.endpoint}"
        raise Refused(f"{keeper.endpoint} holds no committed checkpoint")

    def kill(self, folder: str) -> str:
        """See ``Kept``."""
        keeper = _keeper(folder)
        pid = int(keeper.about()["process"])
        os.kill(pid, signal.SIGKILL)
        return f"{keeper.endpoint}, process {pid}"


def fill_disk(fault: Fault) -> None:
    """The next writes of checkpoints to disk by this process stop in the middle, as on a full one."""
    right = local_disk._write_all
    left = fault.options["writes"]

    def write_half(descriptor: int, buffers: Sequence[Any]) -> int:
        nonlocal left
        left -= 1
        if left <= 0:
            local_disk._write_all = right
        half = [memoryview(buffer)[: len(buffer) // 2] for buffer in buffers]
        right(descriptor, half)
        raise OSError(errno.ENOSPC, "No space left on device (on purpose)")

    local_disk._write_all = write_half


def _keeper(folder: str) -> Keeper:
    """Of this host, for the checkpoints of a folder."""
    job = folder if "://" in folder else os.path.abspath(folder)
    try:
        keeper = client.find(client.name_of(job.rstrip("/")))
    except NoKeeperError as error:
        raise Refused(str(error)) from error
    if keeper is None:
        raise Refused(f"no process keeps checkpoints of {folder} in memory on this host")
    return keeper
