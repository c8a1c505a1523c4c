"""Where a script's own outputs go during an examination: there as long as any host's doctor is at work."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from lightning_dist.monitor.doctor_order import DoctorOrder

_AT_WORK = "at-work"  # holds a file for each doctor
_TRIES = 10  # the last of other doctors may remove the folder while this one comes


@contextlib.contextmanager
def scratch_for(order: DoctorOrder) -> Iterator[None]:
    """Keep it while inside; the last doctor that leaves removes it, so that no host's script loses what it has written.

    A doctor that was killed leaves its file, and the folder stays.

    Raises:
        OSError: The folder cannot be made.
    """
    mine = _enter(order.scratch / _AT_WORK)
    try:
        yield
    finally:
        mine.unlink(missing_ok=True)
        if _is_empty(mine.parent):
            shutil.rmtree(order.scratch, ignore_errors=True)


def _enter(folder: Path) -> Path:
    mine = folder / uuid.uuid4().hex
    for _ in range(_TRIES):
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            mine.touch()
            return mine
    raise FileNotFoundError(f"{folder} is removed as soon as it is made")


def _is_empty(folder: Path) -> bool:
    try:
        return not any(folder.iterdir())
    except FileNotFoundError:  # another doctor removed it while this one came, whose script has written since
        return True
    except OSError:
        return False
