"""Ranks without Lightning, for tests of ``hierdist launch``: ``elastic.py PLAN``.

PLAN says what goes wrong, ``ROUND:RANK:WHAT`` and so on, separated by commas. Each rank sums with the others, prints
what it sees, does what the plan says, and sums again. WHAT is ``kill`` (SIGKILL), ``raise``, ``exit`` (code 7), or
``wait`` (until somebody ends it, with a child process that would wait longer).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import torch
import torch.distributed as dist


def what_now(plan: str, number: int, rank: int) -> str:
    for part in filter(None, plan.split(",")):
        wanted_round, wanted_rank, what = part.split(":")
        if (int(wanted_round), int(wanted_rank)) == (number, rank):
            return what
    return ""


def main(plan: str) -> None:
    rank, number = int(os.environ["RANK"]), int(os.environ["HIERDIST_ROUND"])
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print(
        f"round {number}, rank {rank} of {int(total)}, pid {os.getpid()}, {torch.get_num_threads()} thread", flush=True
    )
    what = what_now(plan, number, rank)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raise":
        raise ValueError(f"planned for round {number}")
    if what == "exit":
        sys.exit(7)
    if what == "wait":
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
        print(f"waits with child {child.pid}")
        signal.pause()
    dist.all_reduce(total)
    print(f"rank {rank} is done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
