"""A launcher: ``chaos_launcher.py RANKS STEPS``. Starts ranks, and each that fails again; SIGTERM ends all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

RANK = Path(__file__).with_name("chaos_rank.py")


def main() -> None:
    num_ranks, num_steps = int(sys.argv[1]), sys.argv[2]
    processes: dict[int, subprocess.Popen[bytes]] = {}

    def end(number: int, frame: object) -> None:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait()
        sys.exit(5)

    signal.signal(signal.SIGTERM, end)
    for rank in range(num_ranks):
        processes[rank] = subprocess.Popen([sys.executable, str(RANK), str(rank), num_steps])
    while processes:
        pid, status = os.wait()
        rank = next(rank for rank, process in processes.items() if process.pid == pid)
        processes[rank].returncode = os.waitstatus_to_exitcode(status)
        if status == 0:
            del processes[rank]
        else:
            processes[rank] = subprocess.Popen([sys.executable, str(RANK), str(rank), num_steps])


if __name__ == "__main__":
    main()
