"""Where a run's files go."""

from __future__ import annotations

import os
from pathlib import Path

import lightning.pytorch as pl

from lightning_dist.capture.saying import say
from lightning_dist.config.checks import is_url

_MOST_RUNS = 10_000
_NAME = "monitor"
_CLAIM = ".hierdist-run"


def run_folder(trainer: pl.Trainer, folder: str | Path | None = None) -> Path | None:
    """The folder of this run, made by rank 0 and the same on all ranks; collective.

    No other run gets it, whether it is over or starts at the same moment: an empty file in it says that it is taken.

    Args:
        trainer: Its loggers' folder, or its ``default_root_dir``, gets ``monitor``; ``monitor-1`` and so on if that has
            a run in it. If it is a URL, the working directory does instead, and that is said.
        folder: Instead of the Trainer's.

    Returns:
        ``None``: rank 0 cannot make it.
    """
    root = trainer.log_dir or trainer.default_root_dir  # collective: every rank asks
    made: str | None = None
    if trainer.is_global_zero:
        try:
            made = str(_make(_below(root) if folder is None else Path(folder)))
        except Exception:  # whatever it is, the others wait for an answer
            made = None
        if made is not None and folder is None and _is_elsewhere(root):
            say(
                f"monitor files are local, and {root} is a URL: they go to {made}. For another folder write "
                "StepTimeline(folder=...) and ClusterMonitor(folder=...), or monitor.folder=..."
            )
    found: str | None = trainer.strategy.broadcast(made)
    return None if found is None else Path(found)


def _below(root: str) -> Path:
    if _is_elsewhere(root):
        return Path.cwd() / _NAME
    # Lightning makes one slash of the three of file:///a.
    return Path("/" + root.partition(":")[2].lstrip("/") if is_url(root) else root) / _NAME


def _is_elsewhere(root: str) -> bool:
    return is_url(root) and not root.startswith("file:")


def _make(first: Path) -> Path:
    """The first of some names that is not there, or is empty, and that no other run takes meanwhile."""
    for number in range(_MOST_RUNS):
        path = first if number == 0 else first.with_name(f"{first.name}-{number}")
        path.mkdir(parents=True, exist_ok=True)
        if not any(path.iterdir()) and _is_claimed(path):
            return path.absolute()
    raise OSError(f"{first} has {_MOST_RUNS} runs beside it")


def _is_claimed(path: Path) -> bool:
    """Whether it is ours now: of all who try, one makes the file."""
    try:
        os.close(os.open(path / _CLAIM, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    return True
