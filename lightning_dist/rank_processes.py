"""The processes of the other ranks of a host: started from this one, watched, and ended with it."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lightning_dist.errors import LaunchError
from lightning_dist.launched_outside import RANKS_VARIABLE
from lightning_dist.parent_watch import PIPE_VARIABLE, bound_command, describe_pipe

if TYPE_CHECKING:
    from lightning_dist.hydra_job import HydraJob

LAUNCH_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", RANKS_VARIABLE)
_POLL_S = 0.1


class RankProcesses:
    """The processes that were started from this one, and what must be undone after them.

    Args:
        raise_grace_s: After a child failed: time this process has to raise an error of its own, in seconds.
        exit_grace_s: At the end of this process: time the children have to end by themselves, in seconds.
        job_key: Identifies the Hydra job the ranks belong to; ``None`` outside of one.
    """

    def __init__(self, raise_grace_s: float, exit_grace_s: float, *, job_key: object | None) -> None:
        self.raise_grace_s = raise_grace_s
        self.exit_grace_s = exit_grace_s
        self.processes: list[subprocess.Popen[bytes]] = []
        self.numbers: list[int] = []
        self.job_key = job_key
        self.main_failed = False
        self._environment = {name: os.environ.get(name) for name in LAUNCH_VARIABLES}
        if "OMP_NUM_THREADS" not in os.environ:  # set by Lightning from the number of ranks of this launch
            self._environment["OMP_NUM_THREADS"] = None
        self._alive_fd = -1  # write end of the pipe; its closing tells the children that this process is gone
        self._calls = 0  # of Trainer functions now running here
        self._in_stage: Callable[[], bool] = bool  # whether the Trainer last entered is still in a stage
        self._reported = False
        self._ended = threading.Event()
        self._observer = threading.Thread(target=self._observe, name="rank-observer", daemon=True)

    def start(self, local_ranks: range, *, first_rank: int, job: HydraJob | None) -> None:
        """Run the script once more for each local rank, or the Hydra job that runs now."""
        read_fd, self._alive_fd = os.pipe()
        try:
            for local_rank in local_ranks:
                rank = first_rank + local_rank
                environment = {
                    **os.environ,
                    "LOCAL_RANK": str(local_rank),
                    PIPE_VARIABLE: describe_pipe(read_fd),
                }
                self.processes.append(_start_process(rank, environment, read_fd, job=job))
                self.numbers.append(rank)
        finally:
            os.close(read_fd)
        if self.processes:
            self._observer.start()

    @contextlib.contextmanager
    def in_trainer(self, in_stage: Callable[[], bool]) -> Iterator[None]:
        """Mark that a Trainer's function runs here: if a rank fails meanwhile, it has to notice or is ended.

        Args:
            in_stage: Whether the Trainer is in a stage (fitting, validating, ...); may be asked after its end, which an
                error can delay: a Trainer that raised is torn down by who caught it.
        """
        failed = self.failure()
        if failed is not None:
            raise LaunchError(f"rank {failed[0]} has ended with {exit_text(failed[1])}; see its own message above")
        self._in_stage = in_stage
        self._calls += 1
        self.main_failed = True  # until it returns
        try:
            yield
            self.main_failed = False
        finally:
            self._calls -= 1

    def stop_observing(self) -> None:
        """A child that ends from now on is no failure."""
        self._ended.set()

    def failure(self) -> tuple[int, int] | None:
        """The first rank found to have ended with an error, and its exit status."""
        for rank, process in zip(self.numbers, self.processes, strict=True):
            status = process.poll()
            if status:
                return rank, status
        return None

    def close(self) -> int:
        """Wait for the children, kill late ones, undo the rest. Returns the status of one that failed, or 0."""
        self._ended.set()
        grace_s = self.raise_grace_s if self.main_failed or self.failure() else self.exit_grace_s
        deadline = time.monotonic() + grace_s
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in zip(self.numbers, self.processes, strict=True) if process.returncode is None]
        if late:
            names = ", ".join(map(str, late))
            _say(f"rank {names} still runs {grace_s:g} s after rank 0 ended; it is killed")
        failed = self.failure()  # before the killing, which is no failure of theirs
        self._kill()
        if self._observer.ident is not None and self._observer is not threading.current_thread():
            self._observer.join()
        self.forget_pipe()
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if failed is not None:
            self._report(*failed)
            return failed[1]
        return -signal.SIGKILL if late else 0

    def forget_pipe(self) -> None:
        """Close the write end; also done in processes that are forked from this one, or children would never see it."""
        if self._alive_fd >= 0:
            os.close(self._alive_fd)
            self._alive_fd = -1

    def _kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()

    def _observe(self) -> None:
        while not self._ended.wait(_POLL_S):
            failed = self.failure()
            if failed is not None:
                self._after_failure(*failed)
                return
            if all(process.returncode == 0 for process in self.processes):
                return

    def _report(self, rank: int, status: int) -> None:
        if not self._reported:
            self._reported = True
            _say(f"rank {rank} ended with {exit_text(status)}")

    def _after_failure(self, rank: int, status: int) -> None:
        self._report(rank, status)
        since: float | None = None
        while not self._ended.wait(_POLL_S / 2):
            # Between two Trainers rank 0 may go on: it learns of the failure when it enters the next, or at its end.
            stuck = self._calls > 0 or (self.main_failed and self._in_stage())
            since = (since or time.monotonic()) if stuck else None
            if since is not None and time.monotonic() - since > self.raise_grace_s:
                break
        else:
            return
        _say(f"rank 0 has not noticed within {self.raise_grace_s:g} s; all ranks are ended")
        self._kill()
        exit_now(exit_status(status))


def _start_process(
    rank: int, environment: dict[str, str], *inherited: int, job: HydraJob | None
) -> subprocess.Popen[bytes]:
    """Run this script, or the Hydra job that runs now, once more."""
    if job is None:
        import __main__  # which module is __main__ is known only when it runs

        spec = __main__.__spec__
        script = [os.path.abspath(sys.argv[0])] if spec is None else ["-m", spec.name]
        command = bound_command([*_interpreter(), *script, *sys.argv[1:]])
        return subprocess.Popen(command, env=environment, pass_fds=inherited)
    with tempfile.TemporaryFile() as config:  # has no name: nobody else can read it, and no crash leaves it behind
        config.write(job.pickled(rank=rank))
        config.seek(0)
        fd = config.fileno()
        arguments = job.command(f"/dev/fd/{fd}")
        if arguments[0] == "-m" and job.cwd != job.original_cwd:
            paths = [job.original_cwd, environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        quiet = ["-W", "ignore:Experimental rerun CLI option"]
        command = bound_command([*_interpreter(), *quiet, *arguments])
        return subprocess.Popen(command, env=environment, cwd=job.cwd, pass_fds=(*inherited, fd))


def _interpreter() -> list[str]:
    """This Python with the options it was started with (-O, -W, -X, -u ...)."""
    options: Callable[[], list[str]] = getattr(subprocess, "_args_from_interpreter_flags", list)
    return [sys.executable, *options()]


def exit_text(status: int) -> str:
    """What an exit status means, in words."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-status).name}"
    return f"exit code {status}"


def exit_status(status: int) -> int:
    """The exit status of a process that ends because a child ended with ``status``, as shells report it."""
    return status if status > 0 else 128 - status


def _say(message: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"lightning_dist: {message}\n")
        sys.stderr.flush()


def exit_now(status: int) -> None:
    """End this process from any thread, whatever the main thread waits for."""
    for worker in multiprocessing.active_children():  # of a data loader
        worker.kill()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
