"""One run: a command started with its output in a file, waited for, and judged by what it left."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lightning_dist.errors import LaunchError, RecordError
from lightning_dist.experiment.curves import read_curve
from lightning_dist.experiment.store import Outcome
from lightning_dist.parent_watch import bound_command

CURVE_VARIABLE = "HIERDIST_CURVE"
"""Tells ``hierdist_ab_hook`` in the ranks where to write."""

_WATCH_EVERY_S = 0.2
_GRACE_S = 20.0  # from being asked to end to being killed
_LAST_LINES = 12
_SEEN_BYTES = 1 << 16  # of the end of the output
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CAUSE = re.compile(r"(\w+\.)*\w*(Error|Exception|Interrupt)\b")


def run_once(
    command: Sequence[str],
    *,
    output: Path,
    curve: Path,
    environ: Mapping[str, str],
    limit_s: float | None = None,
    steps: int | None = None,
    watch: Callable[[], str] | None = None,
) -> Outcome:
    """Run a command to its end; it dies with this process, and with an exception here, Ctrl-C's too.

    Args:
        command: Its words; the first one is a program.
        output: File for what it prints.
        curve: Folder for what its ranks write down.
        environ: Environment of the command.
        limit_s: How long it may take; ``None``: as long as it wants.
        steps: How many steps it is to take; ``None``: that is its business.
        watch: Asked several times a second: why the run is to be ended, or an empty string.

    Raises:
        LaunchError: There is no such program.
    """
    program = shutil.which(command[0])
    if program is None:
        raise LaunchError(f"{command[0]} is no program that can be found; write the command as you run it by hand")
    start_s = time.monotonic()
    with output.open("wb") as sink:
        process = subprocess.Popen(
            bound_command([program, *command[1:]]),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**environ, CURVE_VARIABLE: str(curve.absolute())},
            start_new_session=True,
        )
        try:
            why = _waited(process, limit_s, watch)
        finally:
            _end(process)
    seconds = time.monotonic() - start_s
    why = why or _wrong(process.returncode, curve, steps)
    return Outcome(not why, why, seconds, last_words(output) if why else ())


def _waited(process: subprocess.Popen[bytes], limit_s: float | None, watch: Callable[[], str] | None) -> str:
    """Wait for its end; why it is to be ended before, if it is."""
    end_s = math.inf if limit_s is None else time.monotonic() + limit_s
    while True:
        left_s = min(end_s - time.monotonic(), math.inf if watch is None else _WATCH_EVERY_S)
        try:
            process.wait(None if math.isinf(left_s) else max(left_s, 0.0))
            return ""
        except subprocess.TimeoutExpired:
            if time.monotonic() >= end_s:
                return f"it took more than {limit_s:g} s, and was ended"
        if watch is not None and (why := watch()):
            return why


def last_words(output: Path) -> tuple[str, ...]:
    """The last lines of an output, and before them the last one that names an error, if it is not among them."""
    with output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - _SEEN_BYTES))
        text = file.read().decode(errors="replace")
    # What a progress bar wrote over is not there any more.
    lines = [_ESCAPES.sub("", line).rpartition("\r")[2].rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    lines = [line for line in lines if line]
    shown = lines[-_LAST_LINES:]
    causes = [line for line in lines if _CAUSE.match(line.lstrip())]
    return (causes[-1], "...", *shown) if causes and causes[-1] not in shown else tuple(shown)


def _wrong(status: int, curve: Path, steps: int | None) -> str:
    if status:
        return f"it was ended by {signal.Signals(-status).name}" if status < 0 else f"it ended with status {status}"
    try:
        left = read_curve(curve)
    except (RecordError, OSError) as error:
        return str(error)
    if not left.is_whole:
        return f"its training was cut short after {left.num_steps} steps"
    if steps is not None and left.losses.steps[-1] < steps:
        return (
            f"it took {left.losses.steps[-1]} of {steps} steps: something ends it before (epochs, early stopping, "
            "time), or the number of steps is another option of the script: --steps-option"
        )
    return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask it and what it started to end, wait, and kill what is left."""
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # its group is gone
        os.killpg(process.pid, number)
