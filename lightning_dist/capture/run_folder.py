"""Where a run's files go."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl

_MOST_RUNS = 10_000
_NAME = "monitor"


def run_folder(trainer: pl.Trainer, folder: str | Path | None = None) -> Path | None:
    """The folder of this run, made by rank 0 and the same on all ranks; collective.

    Args:
        trainer: Its loggers' folder, or its ``default_root_dir``, gets ``monitor``; ``monitor-1`` and so on if that has
            a run in it.
        folder: Instead of the Trainer's.

    Returns:
        ``None``: rank 0 cannot make it.
    """
    root = trainer.log_dir or trainer.default_root_dir  # collective: every rank asks
    made: str | None = None
    if trainer.is_global_zero:
        try:
            made = str(_make(Path(root) / _NAME if folder is None else Path(folder)))
        except Exception:  # whatever it is, the others wait for an answer
            made = None
    found: str | None = trainer.strategy.broadcast(made)
    return None if found is None else Path(found)


def _make(first: Path) -> Path:
    """The first of some names that is not there, or is empty."""
    for number in range(_MOST_RUNS):
        path = first if number == 0 else first.with_name(f"{first.name}-{number}")
        path.mkdir(parents=True, exist_ok=True)
        if not any(path.iterdir()):
            return path.absolute()
    raise OSError(f"{first} has {_MOST_RUNS} runs beside it")
