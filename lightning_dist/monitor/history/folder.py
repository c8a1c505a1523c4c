"""Where records of runs are kept: a folder with a small JSON file for each."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_dist.errors import RecordError
from lightning_dist.monitor.history.summary import RunSummary, from_json, to_json


@dataclass(frozen=True)
class History:
    """What a folder holds.

    Attributes:
        runs: The oldest first.
        problems: What could not be read, a sentence each.
    """

    runs: tuple[RunSummary, ...]
    problems: tuple[str, ...] = ()


def write_summary(folder: Path, summary: RunSummary) -> Path:
    """Add a run, or replace what was there of it; whole or not at all.

    Raises:
        OSError: The folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.+-]+", "_", f"{summary.started[:19]}-{summary.run_id}").replace(":", "-")
    path, fresh = folder / f"{name}.json", folder / f".{name}.{os.getpid()}"
    try:
        fresh.write_text(json.dumps(to_json(summary)) + "\n", encoding="utf-8")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    return path


def read_summary(path: Path) -> RunSummary:
    """Read one run.

    Raises:
        RecordError: It cannot be read.
    """
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecordError) as error:
        raise RecordError(f"{path} cannot be read: {error}") from error


def read_history(folder: Path) -> History:
    """Read all runs of a folder; files that cannot be read are named, and left out.

    Raises:
        RecordError: There is no such folder.
    """
    if not folder.is_dir():
        raise RecordError(
            f"{folder} is no folder. A run with callbacks=monitor_callbacks() leaves its record in outputs/history of "
            f"its working directory, or where monitor.history says; name the folder with --history"
        )
    runs, problems = [], []
    for path in sorted(folder.glob("*.json")):
        try:
            runs.append(read_summary(path))
        except RecordError as error:
            problems.append(str(error))
    return History(tuple(sorted(runs, key=lambda run: run.moment)), tuple(problems))


def named(runs: Sequence[RunSummary], name: str) -> RunSummary:
    """The run whose id is or begins with a name.

    Raises:
        RecordError: There is none, or several.
    """
    exact = [run for run in runs if run.run_id == name]
    found = exact or [run for run in runs if run.run_id.startswith(name)]
    if len(found) == 1:
        return found[0]
    shown = ", ".join(run.run_id for run in (found or runs)[-8:]) or "none"
    what = "several runs begin with it" if found else "no such run"
    raise RecordError(f"{name}: {what}; there are: {shown}")
