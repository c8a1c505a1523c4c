"""A rank that counts steps and is hit by faults: ``chaos_rank.py RANK STEPS``; starts at once, as it imports no torch.

It writes each step it begins to the file ``steps.RANK`` of the folder it runs in, and goes on from there when it is
started again, as from a snapshot. SIGTERM ends it in order.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3] / "lightning_dist"
for package in ("lightning_dist", "lightning_dist.elastic", "lightning_dist.config"):
    module = types.ModuleType(package)  # the packages' own __init__ import torch
    module.__path__ = [str(ROOT.parent.joinpath(*package.split(".")))]
    sys.modules[package] = module

from lightning_dist.elastic.chaos.folder import ChaosFolder  # noqa: E402
from lightning_dist.elastic.chaos.injector import Injector, place_of  # noqa: E402

ENDED = threading.Event()


def main() -> None:
    rank, num_steps = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(5))
    progress = Path(f"steps.{rank}")
    done = len(progress.read_text().split()) if progress.exists() else 0
    injector = Injector(ChaosFolder(Path(os.environ["HIERDIST_CHAOS"])), place_of(os.environ, rank))
    for step in range(done, num_steps):
        injector.at_step(step, checkpoints=lambda: os.environ.get("SAVES_TO"))
        with progress.open("a") as file:
            file.write(f"{step} ")
        ENDED.wait(0.002)


if __name__ == "__main__":
    main()
