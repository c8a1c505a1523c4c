"""A process forked from the template becomes a rank, and runs the user's command as ``__main__``.

When another rank has failed it may stay, and run the command once more in the next round; see
:mod:`lightning_dist.elastic.agent.staying`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import os
import random
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from lightning_dist.elastic.agent.command import Kind, Program
from lightning_dist.elastic.agent.ground import Ground, let_go_of_frames
from lightning_dist.elastic.agent.start import Start
from lightning_dist.elastic.agent.staying import wait_for_next
from lightning_dist.elastic.detect.last_words import leave_words
from lightning_dist.elastic.detect.phases import Phase
from lightning_dist.elastic.detect.pulse import Pulse
from lightning_dist.elastic.launched import AGENT_VARIABLE, PROCESS_VARIABLE
from lightning_dist.errors import CollectiveTimeoutError, LaunchError, PeerLostError
from lightning_dist.parent_watch import bind_workers

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_BY_OTHERS = (PeerLostError, CollectiveTimeoutError)
"""Errors that say of a rank that another one has failed."""


@dataclasses.dataclass(frozen=True)
class _Ending:
    """How a script has ended.

    Attributes:
        code: Of its exit.
        stays: Its process may be that of the next round's rank.
    """

    code: object = 0
    stays: bool = False


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
    _become_started(start)


def run(start: Start) -> NoReturn:
    """Run the command to its end, as ``python script.py`` would, and end this process.

    It ends as those of multiprocessing do: threads are waited for, what was registered for the exit is called, output
    is flushed; but the interpreter is not taken apart. That would take a second or two in a forked process, which has
    to copy each page that it touches, and the others would see the connections of a rank that failed closed only then.
    """
    if start.program.kind is Kind.PROGRAM:
        _replace_process(start)
    ground = Ground((signal.SIGINT, *DEFAULT_SIGNALS))
    while True:
        _begin_anew()
        ending = _run_once(start.program)
        following = _stay(start, ground) if ending.stays else None
        if following is None:
            _end(ending.code)
        start = following


def _run_once(program: Program) -> _Ending:
    """Run the command to its end. What is raised is told here and not handed out: it holds what the script has made."""
    try:
        _run_program(program)
    except SystemExit as ended:
        error = ended.__context__ if ended.code else None  # as Hydra ends: it has shown the error
        if error is None:
            return _Ending(ended.code)
        _leave_words(error)
        if _can_stay(error):
            let_go_of_frames(ended)
            return _Ending(ended.code, stays=True)
        return _Ending(ended.code)
    except KeyboardInterrupt:
        return _Ending(-signal.SIGINT)
    except BaseException as error:
        _leave_words(error)
        if _can_stay(error):
            sys.stderr.write(f"rank {os.environ['RANK']} has lost another one: {type(error).__name__}: {error}\n")
            let_go_of_frames(error)
            return _Ending(1, stays=True)
        sys.excepthook(type(error), error.with_traceback(_of_program(error.__traceback__)), error.__traceback__)
        return _Ending(1)
    return _Ending()


def _can_stay(error: BaseException) -> bool:
    """Whether a script ended because of another rank, and in a way that leaves its process as it was."""
    if not isinstance(error, _BY_OTHERS):
        return False
    with contextlib.suppress(LaunchError), contextlib.closing(_pulse()) as pulse:
        return pulse.may_stay
    return False


def _pulse() -> Pulse:
    pulse = Pulse.open()
    if pulse is None:
        raise LaunchError(f"{AGENT_VARIABLE} was removed from the environment")
    return pulse


def _stay(start: Start, ground: Ground) -> Start | None:
    """Take apart what the round has made, and wait for the next one; ``None``: this process is to end."""
    rank = start.environment["RANK"]
    _become_started(start)
    try:
        problem = ground.restore()
    except Exception as error:  # of whatever the script has left to be taken apart
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        sys.stderr.write(f"rank {rank} ends, since another one has failed, and does not stay: {problem}\n")
        return None
    with contextlib.closing(_pulse()) as pulse:
        pulse.enter(Phase.WAITING)
    folder, local_rank = Path(start.environment[AGENT_VARIABLE]), int(start.environment["LOCAL_RANK"])
    environment = wait_for_next(folder, local_rank)
    if environment is None:
        return None
    following = dataclasses.replace(start, environment=environment)
    _become_started(following)
    return following


def _become_started(start: Start) -> None:
    """Take on the variables and the folder of a start, and a name for ps and top: else it looks like the agent."""
    os.environ.clear()
    os.environ.update(start.environment)
    os.environ[PROCESS_VARIABLE] = str(os.getpid())
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"rank{start.environment.get('RANK', start.key)}".encode(), 0, 0, 0)
    os.chdir(start.folder)


def _leave_words(error: BaseException) -> None:
    """Tell the agent what a rank failed of, unless its callbacks have told more."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    leave_words(Path(os.environ[AGENT_VARIABLE]), int(os.environ["LOCAL_RANK"]), text, None)


def _replace_process(start: Start) -> NoReturn:
    program = start.program
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and another program would do so, too
    try:
        os.execve(program.target, [program.target, *program.arguments], dict(start.environment))  # noqa: S606  # a shell would change the words
    except OSError as error:
        with contextlib.suppress(OSError):
            os.write(2, f"{program.target}: {error.strerror}\n".encode())
        os._exit(126)  # as a shell has it


def _begin_anew() -> None:
    """What a new interpreter has of its own: its rank, random numbers, lines that are seen when printed."""
    bind_workers()
    random.seed()
    lightning = sys.modules.get("lightning_utilities.core.rank_zero")
    if lightning is not None:  # it reads the rank when it is imported; until a strategy says more, that counts
        lightning.rank_zero_only.rank = int(os.environ.get("RANK", "0"))
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


def _run_program(program: Program) -> None:
    sys.argv = [program.target, *program.arguments]
    if program.kind is Kind.MODULE:
        runpy.run_module(program.target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program.target, run_name="__main__")


def _end(code: object) -> NoReturn:
    """What the interpreter does at its end, as far as others can see it."""
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    status = code or 0
    if status == -signal.SIGINT:  # so that who waits for it sees the signal, as with Python itself
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)
