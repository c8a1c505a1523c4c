"""A server process: ``python lightning_dist/gradsync/parameter_server/processes/__main__.py``, told by its standard
input what to hold (:class:`~lightning_dist.gradsync.parameter_server.processes.watch.Task`, a line of JSON).

Run as a file, not as a module: the package's own ``__init__`` imports Lightning, which a server does not need. It
writes ``ready`` once it serves, and ends when its standard input does: the rank that started it closes it, or is gone,
however it ended. Signals that a launcher or a terminal sends to all processes are the ranks' business, who may still
want to save.
"""

from __future__ import annotations

import os
import signal
import sys
import types
from pathlib import Path

_LONGEST_TASK = 1 << 24


def main() -> None:
    """See the module."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    root = Path(__file__).resolve().parents[4]
    sys.path[0] = str(root)  # not this folder, whose modules have common names
    package = types.ModuleType("lightning_dist")
    package.__path__ = [str(root / "lightning_dist")]
    sys.modules["lightning_dist"] = package
    from lightning_dist.gradsync.parameter_server.processes.serving import serve
    from lightning_dist.gradsync.parameter_server.processes.task import Task

    line = sys.stdin.buffer.readline(_LONGEST_TASK)
    opened = serve(Task.from_json(line.decode()))
    os.write(1, b"ready\n")
    while os.read(0, 4096):
        pass
    del opened
    os._exit(0)  # threads wait for ranks that are gone, too


if __name__ == "__main__":
    main()
