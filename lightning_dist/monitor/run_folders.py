"""Where the records of runs lie: found from what a user names."""

from __future__ import annotations

import fnmatch
import os
from dataclasses import dataclass
from pathlib import Path

from lightning_dist.errors import RecordError
from lightning_dist.monitor.run_files import FACTS, is_run, read_facts
from lightning_dist.monitor.whole_run import is_round_of

_RANK_FILES = "*-?????*.jsonl"


@dataclass(frozen=True)
class Located:
    """One run.

    Attributes:
        folders: Where its files are, the one with ``run.json`` first.
        passed_over: How many other runs lie where it was found; they are older. Rounds of the same run are not counted.
        problems: What could not be looked into, a sentence each.
    """

    folders: tuple[Path, ...]
    passed_over: int = 0
    problems: tuple[str, ...] = ()


def locate(*paths: Path) -> Located:
    """Find the run that is meant.

    A path is a folder with ``run.json``, that file, or a folder with such folders somewhere below, of which the newest
    is meant. Several paths are the parts of one run whose hosts had no folder in common; one ``run.json`` is enough.

    A ``run.json`` of another tool is none.

    Raises:
        RecordError: There is none, it cannot be read, or the paths are of different runs.
    """
    if not paths:
        raise RecordError("no run was named; name the folder of one, e.g. outputs/train/2026-11-30_09-44-51")
    parts = [_part(path) for path in paths]
    with_facts = [(path, part) for path, part in zip(paths, parts, strict=True) if is_run(part.folders[0])]
    problems = tuple(problem for part in parts for problem in part.problems)
    if not with_facts:
        raise RecordError(
            f"{', '.join(map(str, paths))}: there is no {FACTS} of a run in or below it; StepTimeline() or "
            "ClusterMonitor() among a Trainer's callbacks write it, into the folder monitor/ of the run"
            + "".join(f"; {problem}" for problem in problems)
        )
    ids = {facts.run or facts.run_id: path for path, part in with_facts for facts in [read_facts(part.folders[0])]}
    if len(ids) > 1:
        raise RecordError(
            f"{' and '.join(map(str, ids.values()))} are different runs ({', '.join(ids)}); a report is of one: name "
            "one of them, or compare them with hierdist compare"
        )
    first = with_facts[0][1]
    others = [folder for part in parts for folder in part.folders if folder != first.folders[0]]
    return Located((first.folders[0], *dict.fromkeys(others)), first.passed_over, problems)


def _part(path: Path) -> Located:
    try:
        path.stat()
    except FileNotFoundError:
        raise RecordError(
            f"{path} is not there; name the folder of a run, e.g. outputs/train/2026-11-30_09-44-51"
        ) from None
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} cannot be read: {error}") from error
    if path.is_file():
        if path.name != FACTS:
            raise RecordError(f"{path} is a file; name the folder of a run, or its {FACTS}")
        return Located((path.parent,))
    if is_run(path):
        return Located((path,))
    return _below(path)


def _below(path: Path) -> Located:
    """The newest run somewhere in a folder; else the folders in which ranks have left files, or the folder itself."""
    problems: list[str] = []
    runs: list[tuple[int, Path]] = []
    with_files: list[Path] = []
    for name, _, files in os.walk(path, onerror=lambda error: problems.append(f"not looked into: {error}")):
        folder = Path(name)
        if FACTS in files and is_run(folder):
            runs.append((_changed_ns(folder / FACTS), folder))
        if fnmatch.filter(files, _RANK_FILES):
            with_files.append(folder)
    if runs:
        newest = max(runs)[1]
        others = [folder for _, folder in runs if folder != newest and not _are_rounds(folder, newest)]
        return Located((newest,), len(others), tuple(problems))
    return Located(tuple(sorted(with_files)) or (path,), problems=tuple(problems))


def _are_rounds(folder: Path, newest: Path) -> bool:
    """Whether both are rounds of one run; one that cannot be read is a run of its own."""
    try:
        return folder.parent == newest.parent and is_round_of(folder, read_facts(newest))
    except RecordError:
        return False


def _changed_ns(path: Path) -> int:
    """When it was; what is removed meanwhile is the oldest."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
