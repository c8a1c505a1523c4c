"""A host is checked, in a process of its own: one that hangs is a finding like any other."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_dist.elastic.health.findings import Finding, Health, beside_earlier, beside_others, best_of
from lightning_dist.elastic.health.kept import figures_of_others, keep_figures, known_figures
from lightning_dist.elastic.health.limits import HealthLimits
from lightning_dist.elastic.health.request import Peer, Request
from lightning_dist.parent_watch import bound_command

_PROGRAM = Path(__file__).with_name("__main__.py")
_KILLED_S = 1.0  # one that waits for a dead disk ends when that answers, and not before


def checkup(
    *,
    folders: Sequence[str | os.PathLike[str]] = (),
    peers: Sequence[tuple[str, int]] = (),
    endpoints: Sequence[tuple[str, int]] = (),
    secret: bytes | None = None,
    limits: HealthLimits | None = None,
    history: Path | None = None,
    others: Mapping[str, Mapping[str, float]] | None = None,
) -> Health:
    """Whether this host is fit to train. Takes about a second, and ``limits.deadline_s`` at most.

    Args:
        folders: Where the run will write (checkpoints, logs). One that is missing is checked where it would be made.
        peers: Whom this host must reach, e.g. the leader: address and a port that somebody listens on.
        endpoints: Whom it may reach, e.g. where a leader may be; who answers is judged, the others are not missed.
        secret: That the agents share; with it the first agent that answers is asked to take bytes, and to send some.
        limits: What is allowed.
        history: A file with this host's best figures so far, which it is compared with; made, and kept up to date.
        others: Figures (:attr:`Health.figures`) of other hosts of the run, by name, which it is compared with;
            ``None``: those in the folder of ``history``.
    """
    limits = limits if limits is not None else HealthLimits()
    known = [Peer(*peer) for peer in peers] + [Peer(*peer, must_answer=False) for peer in endpoints]
    request = Request(tuple(os.fspath(folder) for folder in folders), tuple(known), limits, secret)
    begin_s = time.monotonic()
    printed, problem = _run(request)
    health = _read(printed, problem, time.monotonic() - begin_s)
    if not health.is_fit:  # and what is on a disk that does not answer is not asked for here
        return health
    if others is None:
        others = {} if history is None else figures_of_others(history)
    compared = list(beside_others(health.figures, others, limits.slow_factor))
    if history is not None:
        earlier = known_figures(history)
        compared += beside_earlier(health.figures, earlier, limits.slow_factor)
        keep_figures(history, best_of([earlier, health.figures]))
    return Health(tuple(compared), health.figures, health.notes, health.seconds)


def _run(request: Request) -> tuple[str, str | None]:
    """What the checking process printed, and why it did not end well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    process = subprocess.Popen(
        bound_command([sys.executable, str(_PROGRAM)]),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is the launcher's, which ends it
    )
    try:
        printed, complaint = process.communicate(request.to_text(), timeout=request.limits.deadline_s)
    except subprocess.TimeoutExpired as late:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            printed, _ = process.communicate(timeout=_KILLED_S)
            return printed, f"it did not end within {request.limits.deadline_s:g} s"
        return _text(late.stdout), f"it did not end within {request.limits.deadline_s:g} s, and cannot be killed"
    except BaseException:
        process.kill()
        process.communicate()
        raise
    if process.returncode:
        return printed, f"it ended with {process.returncode}: {complaint.strip().rpartition(chr(10))[2]}"
    return printed, None


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _read(printed: str, problem: str | None, seconds: float) -> Health:
    """Put together what the checks said; what was under way when the process ended is to blame."""
    findings: list[Finding] = []
    figures: dict[str, float] = {}
    notes: list[str] = []
    running = "start"
    for line in _lines(printed):
        if "begins" in line:
            running = str(line["begins"])
            continue
        running = "end"
        findings += [Finding(str(line["ended"]), str(text)) for text in line["findings"]]
        figures.update({str(name): float(value) for name, value in line["figures"].items()})
        notes += [str(note) for note in line["notes"]]
    if problem is not None:
        findings.append(Finding(running, problem))
    return Health(tuple(findings), figures, tuple(notes), seconds)


def _lines(printed: str) -> list[dict[str, Any]]:
    found = []
    for line in printed.splitlines():
        with contextlib.suppress(ValueError):  # the last one may be torn
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]
