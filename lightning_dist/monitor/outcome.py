"""What is done with a run's files at its end: judged, and remembered."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from lightning_dist.monitor.diagnosis import diagnose
from lightning_dist.monitor.history.folder import write_summary
from lightning_dist.monitor.history.summary import summarise
from lightning_dist.monitor.rank_file import rank_path
from lightning_dist.monitor.record import RunRecord
from lightning_dist.monitor.rounds import WholeRun
from lightning_dist.monitor.verdict import Verdict
from lightning_dist.monitor.whole_run import read_whole

_TAIL_BYTES = 65536  # holds a file's last step, unless a long timeline follows it
_POLL_S = 0.05


@dataclass(frozen=True)
class Outcome:
    """A run that has been judged.

    Attributes:
        whole: What was recorded, of all rounds.
        record: The round of it that the verdict is about.
        verdict: What it says.
        kept: Its record in the history; ``None``: none is kept.
    """

    whole: WholeRun
    record: RunRecord
    verdict: Verdict
    kept: Path | None


def judge(folder: Path, *, history: Path | None) -> Outcome:
    """Read a run's files, say what bounds its steps, and leave a record in a history.

    Raises:
        RecordError: The files cannot be read.
        OSError: The history cannot be written to.
    """
    whole = read_whole(folder)
    record = whole.main
    verdict = diagnose(record)
    kept = None if history is None else write_summary(history, summarise(record, verdict, whole=whole))
    return Outcome(whole, record, verdict, kept)


def wait_for_ranks(folder: Path, world_size: int, *, timeout_s: float) -> bool:
    """Wait until the files of all ranks end with the same step, as they do once all ranks have closed them.

    Returns:
        Whether they do; ranks of hosts that do not share the folder never will.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        last = {_last_step(rank_path(folder, "steps", rank)) for rank in range(world_size)}
        if len(last) == 1 and None not in last:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)


def size_bytes(folder: Path) -> int:
    """Of a run's files."""
    return sum(path.stat().st_size for path in folder.glob("*.jsonl"))


def _last_step(path: Path) -> int | None:
    tail_bytes = _TAIL_BYTES
    try:
        while True:
            size = path.stat().st_size
            with path.open("rb") as file:
                file.seek(max(size - tail_bytes, 0))
                found = _last_step_of(file.read())
            if found is not None or tail_bytes >= size:
                return found
            tail_bytes *= 8
    except OSError:
        return None


def _last_step_of(tail: bytes) -> int | None:
    for line in reversed(tail.splitlines()):
        try:
            content = json.loads(line)
        except ValueError:  # torn, or the tail begins inside it
            continue
        if isinstance(content, dict) and content.get("kind") == "step":
            return int(content["step"])
    return None
