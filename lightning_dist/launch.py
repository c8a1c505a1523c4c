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
import functools
import os
import signal
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lightning_dist.errors import LaunchError
from lightning_dist.launched_outside import RANKS_VARIABLE, check_environment
from lightning_dist.parent_watch import bind_workers, watch_parent
from lightning_dist.rank_processes import RankProcesses, exit_now, exit_status, exit_text

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.trainer.connectors.signal_connector import _SIGNUM
    from omegaconf import DictConfig

    from lightning_dist.hydra_job import HydraJob

__all__ = ["FunctionLauncher", "RankLauncher", "attach", "check_environment", "end_job", "job", "watch_parent"]

_ranks: RankProcesses | None = None
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
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # Lightning refuses hosts of different sizes there
            self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
        elif _ranks is not None:
            self.procs = _ranks.processes  # so that Lightning passes signals on from a second Trainer as well
        _set_num_threads_if_needed(num_processes=self.num_processes)
        if _ranks is None:
            return function(*args, **kwargs)
        with _ranks.in_trainer(_stage_of(trainer)):
            return function(*args, **kwargs)

    def _call_children_scripts(self) -> None:
        global _ranks
        end_job()  # of an earlier job in this process
        self._check_can_spawn_children()
        ranks = RankProcesses(self.raise_grace_s, self.exit_grace_s, job_key=_running_job_key())
        _ranks = ranks
        os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
        os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
        node_rank = self.cluster_environment.node_rank()
        os.environ["NODE_RANK"] = str(node_rank)
        os.environ["LOCAL_RANK"] = str(self.cluster_environment.local_rank())
        os.environ["WORLD_SIZE"] = os.environ[RANKS_VARIABLE] = str(self.num_processes * self.num_nodes)
        try:
            ranks.start(range(1, self.num_processes), first_rank=node_rank * self.num_processes, job=_hydra_job())
            if ranks.processes:
                _register_hooks()
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


class FunctionLauncher(_MultiProcessingLauncher):
    """Calls the Trainer's function in new processes, by ``spawn``, ``fork`` or ``forkserver``."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start all ranks and wait for them.

        A fit on one rank before has left its process group and variables here. Ranks that are forked would take the
        group for theirs, whose threads they lack, and wait for ever; all would meet at a port that is taken.

        Raises:
            LaunchError: This process is one of several ranks itself.
        """
        if dist.is_available() and dist.is_initialized():
            if dist.get_world_size() > 1:
                own = len(self._strategy.parallel_devices or ())
                raise LaunchError(
                    f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already, and would start {own} "
                    f"ranks of its own by {self._start_method}: use one start method in a script"
                )
            end_job()
            if dist.is_initialized():  # by another strategy
                dist.destroy_process_group()
        return super().launch(function, *args, trainer=trainer, **kwargs)


def _stage_of(trainer: Trainer | None) -> Callable[[], bool]:
    """Asks whether a Trainer is in a stage, without keeping it alive."""
    reference = None if trainer is None else weakref.ref(trainer)

    def in_stage() -> bool:
        alive = reference() if reference is not None else None
        return alive is not None and alive.state.stage is not None

    return in_stage


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
            raise LaunchError(f"a rank ended with {exit_text(status)}; see its own message above")
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


def _at_exit() -> None:
    failed_here = _ranks is not None and _ranks.main_failed
    status = end_job()
    if status and not failed_here:
        exit_now(exit_status(status))  # the script ended well here, but the run did not


def _in_forked_process() -> None:
    global _ranks
    ranks, _ranks = _ranks, None
    if ranks is not None:
        ranks.forget_pipe()


@functools.cache
def _register_hooks() -> None:
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=_in_forked_process)
