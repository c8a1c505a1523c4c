"""A run's files, written and merged: ``run.json`` of rank 0, and a file of steps and one of samples of each rank."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_dist.errors import RecordError
from lightning_dist.monitor import lines
from lightning_dist.monitor.record import RankHeader, RankRecord, RunFacts, RunRecord, Sample, Span, StepRecord

FACTS = "run.json"
_HEAD_BYTES = 4096  # the format is what it begins with
_NAME = re.compile(r"(steps|samples)-(\d{5,})\.jsonl")


def write_facts(folder: Path, facts: RunFacts) -> None:
    """Write ``run.json``, whole or not at all.

    Raises:
        OSError: The folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f".{FACTS}.{os.getpid()}"
    try:
        fresh.write_text(lines.facts_text(facts), encoding="utf-8")
        fresh.replace(folder / FACTS)
    finally:
        fresh.unlink(missing_ok=True)


def is_run(folder: Path) -> bool:
    """Whether its ``run.json`` is ours: other tools write files of that name too. One that cannot be read is none."""
    try:
        with (folder / FACTS).open("rb") as file:
            return lines.FORMAT.encode() in file.read(_HEAD_BYTES)
    except OSError:
        return False


def read_facts(folder: Path) -> RunFacts:
    """Read ``run.json``.

    Raises:
        RecordError: There is none, or it cannot be read.
    """
    path = folder / FACTS
    try:
        content = lines.parsed(path.read_text(encoding="utf-8", errors="replace"))
        if content is None:
            raise ValueError("not a JSON object")
        return lines.facts_of(content)
    except FileNotFoundError as error:
        raise RecordError(
            f"{folder} holds no run: {FACTS} is not there; StepTimeline() or ClusterMonitor() write it into the folder "
            "monitor/ of a run"
        ) from error
    except (OSError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise RecordError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def read_run(*folders: Path) -> RunRecord:
    """Merge the files of a run.

    Args:
        *folders: One, or several if the hosts did not share one; one of them has ``run.json``.

    Raises:
        RecordError: No folder has a readable ``run.json``, or no rank's file can be read.
    """
    with_facts = [folder for folder in folders if is_run(folder)] or list(folders[:1])
    facts = read_facts(with_facts[0])
    read: dict[int, _Read] = {}
    problems: list[str] = []
    for folder in folders:
        for path in _files(folder, problems):
            match = _NAME.fullmatch(path.name)
            if match:
                _read_file(path, int(match[2]), read.setdefault(int(match[2]), _Read()), problems)
    ranks = {rank: each.merged() for rank, each in sorted(read.items()) if each.header is not None}
    if not ranks:
        raise RecordError(
            f"{folders[0]} holds no steps or samples of any rank" + "".join(f"; {problem}" for problem in problems)
        )
    missing = [rank for rank in range(facts.world_size) if rank not in ranks]
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        problems.append(f"nothing of {len(missing)} of {facts.world_size} ranks was found: {shown}")
    return RunRecord(facts, ranks, tuple(problems))


@dataclasses.dataclass
class _Read:
    header: RankHeader | None = None
    steps: list[StepRecord] = dataclasses.field(default_factory=list)
    samples: list[Sample] = dataclasses.field(default_factory=list)
    spans: list[Span] = dataclasses.field(default_factory=list)

    def take_header(self, header: RankHeader) -> None:
        """The first one stays; what others know more is added: a rank has two files."""
        if self.header is None:
            self.header = header
            return
        self.header = dataclasses.replace(
            self.header,
            unavailable={**header.unavailable, **self.header.unavailable},
            facts={**header.facts, **self.header.facts},
        )

    def merged(self) -> RankRecord:
        assert self.header is not None
        return RankRecord(
            self.header,
            tuple(sorted(self.steps, key=lambda step: step.start_ns)),
            tuple(sorted(self.samples, key=lambda sample: sample.wall_ns)),
            tuple(sorted(self.spans, key=lambda span: span.start_ns)),
        )


def _files(folder: Path, problems: list[str]) -> list[Path]:
    try:
        return sorted(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        problems.append(f"{folder} cannot be read: {error}")
        return []


def _read_file(path: Path, named: int, read: _Read, problems: list[str]) -> None:
    """Add what a file holds that is named for a rank."""
    try:
        texts: Sequence[str] = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        problems.append(f"{path} cannot be read: {error}")
        return
    rank: int | None = None
    bad = 0
    for number, text in enumerate(texts):
        line = lines.parsed(text) if text else None
        if line is None:
            bad += bool(text) and number < len(texts) - 1  # the last one may be torn: its rank was killed
            continue
        if line.get("kind") == "rank" and line.get("rank") != named:
            problems.append(f"{path} is of rank {line.get('rank')}, as it says inside, and was left out: rename it")
            return
        try:
            rank = _take(line, rank, read)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            bad += 1
    if rank is None:
        problems.append(f"{path} does not say whose it is: its first line is missing or torn")
    if bad:
        problems.append(f"{path}: {bad} lines could not be read")


def _take(line: dict[str, Any], rank: int | None, read: _Read) -> int | None:
    kind = line.get("kind")
    if kind == "rank":
        header = lines.header_of(line)
        read.take_header(header)
        return header.rank
    if rank is None:
        return None
    if kind == "step":
        read.steps.append(lines.step_of(line, rank))
    elif kind == "sample":
        if line.get("value") is not None:
            read.samples.append(lines.sample_of(line))
    elif kind == "spans":
        read.spans += lines.spans_of(line)
    return rank
