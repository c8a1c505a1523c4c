"""A process forked from the template becomes a rank, and runs the user's command as ``__main__``."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import random
import runpy
import signal
import sys
import traceback
from types import TracebackType

from lightning_dist.elastic.agent.command import Kind
from lightning_dist.elastic.agent.start import Start
from lightning_dist.parent_watch import bind_workers

_PR_SET_PDEATHSIG = 1
DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent ends; end at once if it is gone by now.

    Args:
        parent: Its process id.
        signum: 0 takes it back.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def become(start: Start, *, stdout: int, stderr: int, parent: int) -> None:
    """Take on what makes this process a rank; the first thing done in it.

    It is alone in a process group, which ends with it: workers of its data loaders are in there as well.

    Args:
        start: What was asked for.
        stdout: Descriptor that becomes its standard output.
        stderr: Likewise.
        parent: The template's process id.
    """
    os.setpgid(0, 0)
    die_with_parent(parent)
    for signum in DEFAULT_SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    os.environ.clear()
    os.environ.update(start.environment)
    os.chdir(start.folder)


def run(start: Start) -> None:
    """Run the command to its end, as ``python script.py`` would; to be called last.

    Raises:
        SystemExit: With the exit code.
    """
    if start.program.kind is Kind.PROGRAM:
        _replace_process(start)
    _begin_anew()
    program = start.program
    sys.argv = [program.target, *program.arguments]
    try:
        if program.kind is Kind.MODULE:
            runpy.run_module(program.target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program.target, run_name="__main__")
    except SystemExit:
        raise
    except KeyboardInterrupt:
        _end_by_interrupt()
    except BaseException as error:
        trace = _of_program(error.__traceback__)
        if start.words is not None:
            write_words(start.words, error)
        sys.excepthook(type(error), error, trace)
        raise SystemExit(1) from None


def write_words(path: str, error: BaseException) -> None:
    """Leave what a rank failed of for the agent, unless there is more in the file already."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    with contextlib.suppress(OSError):
        with open(path, "x", encoding="utf-8") as file:
            json.dump({"error": text}, file)


def _replace_process(start: Start) -> None:
    program = start.program
    try:
        os.execve(program.target, [program.target, *program.arguments], dict(start.environment))
    except OSError as error:
        sys.stderr.write(f"{program.target}: {error.strerror}\n")
        raise SystemExit(126) from None


def _begin_anew() -> None:
    """What a new interpreter has of its own: random numbers, and lines that are seen when they are printed."""
    gc.unfreeze()
    bind_workers()
    random.seed()
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    if torch is not None:
        torch.seed()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # they are files here


def _of_program(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without our frames and runpy's, as the user's own Python shows it."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    own = trace
    while own is not None and own.tb_frame.f_code.co_filename in ours:
        own = own.tb_next
    return own or trace


def _end_by_interrupt() -> None:
    """As Python ends on Ctrl-C: so that who waits for it sees the signal."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
