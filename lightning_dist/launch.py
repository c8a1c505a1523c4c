"""Starting one process a rank by running the script again, and ending all of them together.

``python script.py`` is rank 0 of its host; :class:`RankLauncher` starts the others when the first Trainer begins. From
then on the promise is that no process outlives the run:

- A child ends when its main process does, even by SIGKILL (see :mod:`lightning_dist.parent_watch`).
- When a child fails, the main process gets a moment to raise its own error, which names the operation and the peer;
  then everything is ended with a message that names the rank.
- When the main process ends, children get a moment to finish; then they are killed.

In a Hydra application each job starts its own ranks (see :mod:`lightning_dist.hydra_job`).

Note [process-wide state]
    Environment variables and children belong to the process, not to a Trainer: a second Trainer of a script finds the
    ranks that the first one started. ``_ranks`` is that state; it is None where nothing was started from this process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lightning_dist.errors import LaunchError
from lightning_dist.launched_outside import RANKS_VARIABLE, check_environment
from lightning_dist.parent_watch import PIPE_VARIABLE, bind_workers, bound_command, describe_pipe, watch_parent

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.trainer.connectors.signal_connector import _SIGNUM
    from omegaconf import DictConfig

    from lightning_dist.hydra_job import HydraJob

__all__ = ["RankLauncher", "attach", "check_environment", "end_job", "job", "watch_parent"]

_LAUNCH_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", RANKS_VARIABLE)
_POLL_S = 0.1

_log = logging.getLogger(__name__)
_ranks: _Ranks | None = None
_task_job: HydraJob | None = None  # the job as it was before its task could edit the config; set by `job`

ReturnT = TypeVar("ReturnT")


class RankLauncher(_SubprocessScriptLauncher):
    """Runs the script once more for each further rank of this host.

    Nothing is started where the ranks exist already: under torchrun or SLURM, in a child, and for the second Trainer of
    a script, whose ranks run the script themselves and arrive at that Trainer too.

    Args:
        cluster_environment: Knows the main address, the port and this host's number.
        num_processes: Ranks on this host.
        num_nodes: Hosts.
        raise_grace_s: After a child failed: time the main process has to raise an error of its own, in seconds.
        exit_grace_s: At the end of the main process: time the children have to end by themselves, in seconds.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        *,
        raise_grace_s: float = 5.0,
        exit_grace_s: float = 30.0,
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        attach()  # before Lightning asks whether processes exist already: those of an ended job do not count
        self.raise_grace_s = raise_grace_s
        self.exit_grace_s = exit_grace_s

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other ranks if there are none yet, then call ``function`` here.

        Raises:
            LaunchError: The launcher outside started another number of processes, or a rank has already failed.
        """
        check_environment(self.num_processes, self.num_nodes, os.environ)
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
        elif _ranks is not None:
            self.procs = _ranks.processes  # so that Lightning passes signals on from a second Trainer as well
        _set_num_threads_if_needed(num_processes=self.num_processes)
        if _ranks is None:
            return function(*args, **kwargs)
        with _ranks.in_trainer(trainer):
            return function(*args, **kwargs)

    def _call_children_scripts(self) -> None:
        global _ranks
        end_job()  # of an earlier job in this process
        self._check_can_spawn_children()
        ranks = _Ranks(self.raise_grace_s, self.exit_grace_s)
        _ranks = ranks
        os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
        os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
        node_rank = self.cluster_environment.node_rank()
        os.environ["NODE_RANK"] = str(node_rank)
        os.environ["LOCAL_RANK"] = str(self.cluster_environment.local_rank())
        os.environ["WORLD_SIZE"] = os.environ[RANKS_VARIABLE] = str(self.num_processes * self.num_nodes)
        try:
            ranks.start(range(1, self.num_processes), first_rank=node_rank * self.num_processes)
        except BaseException:
            end_job()
            raise
        self.procs = ranks.processes

    def kill(self, signum: _SIGNUM) -> None:
        """Pass a signal on to the ranks that were started from this process."""
        if signum == signal.SIGKILL and _ranks is not None:
            _ranks.main_failed = True  # Lightning does this on Ctrl-C; that they end is no news
            _ranks.stop_observing()
        super().kill(signum)

    def close(self) -> None:
        """Wait for the ranks that were started from this process, kill those that are late, and forget them."""
        end_job()


class _Ranks:
    """The processes that were started from this one, and what must be undone after them."""

    def __init__(self, raise_grace_s: float, exit_grace_s: float) -> None:
        self.raise_grace_s = raise_grace_s
        self.exit_grace_s = exit_grace_s
        self.processes: list[subprocess.Popen[bytes]] = []
        self.numbers: list[int] = []
        self.job_key = _running_job_key()
        self.main_failed = False
        self._environment = {name: os.environ.get(name) for name in _LAUNCH_VARIABLES}
        if "OMP_NUM_THREADS" not in os.environ:  # set by Lightning from the number of ranks of this launch
            self._environment["OMP_NUM_THREADS"] = None
        self._alive_fd = -1  # write end of the pipe; its closing tells the children that this process is gone
        self._calls = 0  # of Trainer functions now running here
        self._trainer: weakref.ref[Trainer] | None = None
        self._reported = False
        self._ended = threading.Event()
        self._observer = threading.Thread(target=self._observe, name="rank-observer", daemon=True)

    def start(self, local_ranks: range, *, first_rank: int) -> None:
        read_fd, self._alive_fd = os.pipe()
        try:
            for local_rank in local_ranks:
                rank = first_rank + local_rank
                environment = {
                    **os.environ,
                    "LOCAL_RANK": str(local_rank),
                    PIPE_VARIABLE: describe_pipe(read_fd),
                }
                self.processes.append(_start_process(rank, environment, read_fd))
                self.numbers.append(rank)
        finally:
            os.close(read_fd)
        if self.processes:
            _register_hooks()
            self._observer.start()

    @contextlib.contextmanager
    def in_trainer(self, trainer: Trainer | None) -> Iterator[None]:
        """Mark that a Trainer's function runs here: if a rank fails meanwhile, it has to notice or is ended."""
        failed = self.failure()
        if failed is not None:
            raise LaunchError(f"rank {failed[0]} has ended with {_exit_text(failed[1])}; see its own message above")
        self._trainer = None if trainer is None else weakref.ref(trainer)
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
            _say(f"rank {rank} ended with {_exit_text(status)}")

    def _after_failure(self, rank: int, status: int) -> None:
        self._report(rank, status)
        since: float | None = None
        while not self._ended.wait(_POLL_S / 2):
            # Between two Trainers rank 0 may go on: it learns of the failure when it enters the next, or at its end.
            stuck = self._calls > 0 or self._tearing_down()
            since = (since or time.monotonic()) if stuck else None
            if since is not None and time.monotonic() - since > self.raise_grace_s:
                break
        else:
            return
        _say(f"rank 0 has not noticed within {self.raise_grace_s:g} s; all ranks are ended")
        self._kill()
        _exit_now(_exit_status(status))

    def _tearing_down(self) -> bool:
        trainer = self._trainer() if self._trainer is not None else None
        return self.main_failed and trainer is not None and trainer.state.stage is not None


def _start_process(rank: int, environment: dict[str, str], *inherited: int) -> subprocess.Popen[bytes]:
    """Run this script, or the Hydra job that runs now, once more."""
    hydra_job = _hydra_job()
    if hydra_job is None:
        import __main__  # which module is __main__ is known only when it runs

        spec = __main__.__spec__
        script = [os.path.abspath(sys.argv[0])] if spec is None else ["-m", spec.name]
        command = bound_command([*_interpreter(), *script, *sys.argv[1:]])
        return subprocess.Popen(command, env=environment, pass_fds=inherited)
    with tempfile.TemporaryFile() as config:  # has no name: nobody else can read it, and no crash leaves it behind
        config.write(hydra_job.pickled(rank=rank))
        config.seek(0)
        fd = config.fileno()
        arguments = hydra_job.command(f"/dev/fd/{fd}")
        if arguments[0] == "-m" and hydra_job.cwd != hydra_job.original_cwd:
            paths = [hydra_job.original_cwd, environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        quiet = ["-W", "ignore:Experimental rerun CLI option"]
        command = bound_command([*_interpreter(), *quiet, *arguments])
        return subprocess.Popen(command, env=environment, cwd=hydra_job.cwd, pass_fds=(*inherited, fd))


def attach() -> None:
    """Make this process part of whatever run it is in; called when a launcher is made. Quick, safe to repeat.

    In a child: watch the main process. In a main process: if the ranks it started belong to a Hydra job that has ended,
    end them and remove what that job left in the environment, so that this job starts its own.
    """
    watch_parent()
    bind_workers()
    if _ranks is not None and _ranks.job_key is not _running_job_key():
        end_job()


def end_job() -> int:
    """End the ranks that were started from this process and remove what they needed: environment, process group.

    Waits for ranks that are finishing. Does nothing where no ranks were started, so that what torchrun or SLURM set up
    stays. Returns the exit status of the first rank that failed, or 0.
    """
    global _ranks
    ranks, _ranks = _ranks, None
    if ranks is None:
        return 0
    status = ranks.close()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    return status


def job(task: Callable[[DictConfig], ReturnT]) -> Callable[[DictConfig], ReturnT]:
    """Decorate the task function of a Hydra application, below ``@hydra.main``.

    Optional. It hands the task's config to the ranks as it was before the task ran, ends the job's ranks as soon as the
    task is over (without it: when the next job makes its strategy, or at exit), and raises if one of them failed::

        @hydra.main(version_base="1.3", config_path="pkg://lightning_dist.conf", config_name="train")
        @lightning_dist.launch.job
        def main(config): ...

    Raises:
        LaunchError: The task ended well here, but another rank failed.
    """

    @functools.wraps(task)
    def run(config: DictConfig) -> ReturnT:
        global _task_job
        attach()
        _task_job = _hydra_job(config)
        try:
            result = task(config)
        except BaseException:
            if _ranks is not None:
                _ranks.main_failed = True
            end_job()
            raise
        finally:
            _task_job = None
        status = end_job()
        if status:
            raise LaunchError(f"a rank ended with {_exit_text(status)}; see its own message above")
        return result

    return run


def _hydra_job(task_config: DictConfig | None = None) -> HydraJob | None:
    """The job that runs now, or None. Hydra is not imported for it: who has not, has no job."""
    if _task_job is not None:
        return _task_job
    if "hydra.core.hydra_config" not in sys.modules:
        return None
    from lightning_dist.hydra_job import current_job  # costs an import only Hydra applications need

    return current_job(task_config)


def _running_job_key() -> object | None:
    if "hydra.core.hydra_config" not in sys.modules:
        return None
    from lightning_dist.hydra_job import running_job_key  # see above

    return running_job_key()


def _interpreter() -> list[str]:
    """This Python with the options it was started with (-O, -W, -X, -u ...)."""
    options: Callable[[], list[str]] = getattr(subprocess, "_args_from_interpreter_flags", list)
    return [sys.executable, *options()]


def _exit_text(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-status).name}"
    return f"exit code {status}"


def _exit_status(status: int) -> int:
    """The exit status of a process that ends because a child ended with ``status``, as shells report it."""
    return status if status > 0 else 128 - status


def _say(message: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"lightning_dist: {message}\n")
        sys.stderr.flush()


def _exit_now(status: int) -> None:
    """End this process from any thread, whatever the main thread waits for."""
    for worker in multiprocessing.active_children():  # of a data loader
        worker.kill()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _at_exit() -> None:
    failed_here = _ranks is not None and _ranks.main_failed
    status = end_job()
    if status and not failed_here:
        _exit_now(_exit_status(status))  # the script ended well here, but the run did not


def _in_forked_process() -> None:
    global _ranks
    ranks, _ranks = _ranks, None
    if ranks is not None:
        ranks.forget_pipe()


@functools.cache
def _register_hooks() -> None:
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=_in_forked_process)
