"""What a rank's process was before it ran the user's script, and whether it is so again afterwards.

A script changes its process: signals, streams, logging, threads, children. Those things that can be put back are; where
others are left, the process is no place to run the script once more, and ends.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import multiprocessing.resource_tracker
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_dist.comm.freeing import free_groups

_JOIN_S = 1.0  # for threads that are about to end
_HARMLESS_THREADS = ("TMonitor",)  # tqdm's, which it starts once in a process


class Ground:
    """The state of this process now, to which it is to come back.

    Args:
        signals: Those whose handlers are put back.
    """

    def __init__(self, signals: tuple[signal.Signals, ...]) -> None:
        self._handlers = {each: signal.getsignal(each) for each in signals}
        self._streams = (sys.stdout, sys.stderr)
        self._path = list(sys.path)
        self._filters = list(warnings.filters)
        self._show = warnings.showwarning
        self._excepthook = sys.excepthook
        root = logging.getLogger()
        self._logging = (list(root.handlers), root.level)
        self._threads = {thread.ident for thread in threading.enumerate()}
        self._children = _children()

    def restore(self) -> str | None:
        """Put back what can be, and end all process groups; what else is left, or ``None``: nothing.

        No frame of the script, and no exception that holds one, may be referred to any more.
        """
        for each, handler in self._handlers.items():
            signal.signal(each, handler)
        sys.stdout, sys.stderr = self._streams
        sys.path[:] = self._path
        warnings.filters[:] = self._filters  # type: ignore[index]  # a list, whatever its stub says
        warnings.showwarning = self._show
        sys.excepthook = self._excepthook
        self._restore_logging()
        if dist.is_initialized():
            free_groups()  # nobody waits for what a peer that is gone will not send
            dist.destroy_process_group()
        gc.collect()  # with what the script has made, its loaders' workers end
        return self._threads_left() or self._children_left() or _device_used()

    def _restore_logging(self) -> None:
        root, (handlers, level) = logging.getLogger(), self._logging
        for handler in root.handlers:
            if handler not in handlers:
                handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)

    def _threads_left(self) -> str | None:
        deadline_s = time.monotonic() + _JOIN_S
        for thread in threading.enumerate():
            if thread.ident in self._threads or type(thread).__name__ in _HARMLESS_THREADS:
                continue
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                return f"the thread {thread.name!r} of the script still runs"
        return None

    def _children_left(self) -> str | None:
        multiprocessing.active_children()  # this collects those that have ended
        subprocess._cleanup()  # type: ignore[attr-defined]  # likewise
        tracker = getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None)  # once in a process
        left = _children() - self._children - {tracker}
        return f"the process {min(left)} that the script has started still runs" if left else None


def let_go_of_frames(error: BaseException) -> None:
    """Take from an error, and from those that it came of, what they hold of the program.

    A future of torch's keeps the error of a gradient hook where Python's collector does not see it: through the error's
    frames it would keep the model, its groups and their connections.
    """
    left: list[BaseException] = [error]
    while left:
        one = left.pop()
        left += [each for each in (one.__cause__, one.__context__) if each is not None]
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = one.__cause__ = one.__context__ = None


def _children() -> set[int]:
    """Process ids of this process's children."""
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def _device_used() -> str | None:
    return "the script has used CUDA" if torch.cuda.is_initialized() else None
