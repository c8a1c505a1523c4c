"""Where the records of runs lie: found from what a user names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lightning_dist.errors import RecordError
from lightning_dist.monitor.run_files import FACTS, read_facts

_RANK_FILES = "*-?????*.jsonl"


@dataclass(frozen=True)
class Located:
    """One run.

    Attributes:
        folders: Where its files are, the one with ``run.json`` first.
        passed_over: How many other runs lie where it was found; they are older.
    """

    folders: tuple[Path, ...]
    passed_over: int = 0


def locate(*paths: Path) -> Located:
    """Find the run that is meant.

    A path is a folder with ``run.json``, that file, or a folder with such folders somewhere below, of which the newest
    is meant. Several paths are the parts of one run whose hosts had no folder in common; one ``run.json`` is enough.

    Raises:
        RecordError: There is none, or the paths are of different runs.
    """
    if not paths:
        raise RecordError("no run was named; name the folder of one, e.g. outputs/train/2026-11-30_09-44-51")
    parts = [_part(path) for path in paths]
    with_facts = [(path, part) for path, part in zip(paths, parts, strict=True) if (part.folders[0] / FACTS).exists()]
    if not with_facts:
        raise RecordError(
            f"{', '.join(map(str, paths))}: there is no {FACTS} in or below it; StepTimeline() or ClusterMonitor() "
            "among a Trainer's callbacks write it, into the folder monitor/ of the run"
        )
    ids = {read_facts(part.folders[0]).run_id: path for path, part in with_facts}
    if len(ids) > 1:
        raise RecordError(
            f"{' and '.join(map(str, ids.values()))} are different runs ({', '.join(ids)}); a report is of one: name "
            "one of them, or compare them with hierdist compare"
        )
    first = with_facts[0][1]
    others = [folder for part in parts for folder in part.folders if folder != first.folders[0]]
    return Located((first.folders[0], *dict.fromkeys(others)), first.passed_over)


def _part(path: Path) -> Located:
    if not path.exists():
        raise RecordError(f"{path} is not there; name the folder of a run, e.g. outputs/train/2026-11-30_09-44-51")
    if path.is_file():
        if path.name != FACTS:
            raise RecordError(f"{path} is a file; name the folder of a run, or its {FACTS}")
        return Located((path.parent,))
    if (path / FACTS).exists():
        return Located((path,))
    found = sorted(path.rglob(FACTS), key=lambda facts: (facts.stat().st_mtime_ns, str(facts)))
    if found:
        return Located((found[-1].parent,), len(found) - 1)
    files = sorted(path.rglob(_RANK_FILES))
    return Located(tuple(dict.fromkeys(file.parent for file in files)) or (path,))
