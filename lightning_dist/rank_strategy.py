"""A strategy's ranks: who they are, how they start, meet and talk, whatever they do with a model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

from lightning_dist import build, heartbeat
from lightning_dist.comm import watchful
from lightning_dist.comm.agent_store import open_agent_store
from lightning_dist.comm.agreement import Agreement
from lightning_dist.comm.collectives import Collectives
from lightning_dist.config import START_METHODS, ParallelConfig, SyncConfig, TopologyConfig
from lightning_dist.data.loading.loader import ShardedLoader
from lightning_dist.data.loading.open_loaders import OpenLoaders
from lightning_dist.data.loading.patient_workers import make_patient
from lightning_dist.elastic.launched import launched
from lightning_dist.errors import ConfigError, unknown_option
from lightning_dist.events import EventStream
from lightning_dist.launch import FunctionLauncher, RankLauncher
from lightning_dist.parent_watch import watch_parent

BroadcastT = TypeVar("BroadcastT")


class RankStrategy(ParallelStrategy):
    """Base of :class:`~lightning_dist.strategy.HierDistStrategy`, which says what becomes of the model.

    Args:
        parallel: Mode and options.
        sync: How gradients travel; its deadline is that of everything between ranks.
        topology: Who sits where.
        process_group_backend: ``"nccl"`` or ``"gloo"``; by device if not given.
        start_method: ``popen``, ``spawn``, ``fork`` or ``forkserver``.
        **lightning: Arguments of :class:`~lightning.pytorch.strategies.ParallelStrategy`.

    Raises:
        ConfigError: What is asked for cannot work, whatever the cluster.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        sync: SyncConfig,
        topology: TopologyConfig,
        *,
        process_group_backend: str | None,
        start_method: str,
        **lightning: Any,
    ) -> None:
        super().__init__(**lightning)
        if start_method not in START_METHODS:
            raise unknown_option("start_method", start_method, START_METHODS)
        self.parallel_config = parallel
        self.sync_config = sync
        self.topology_config = topology
        self.start_method = start_method
        self.events = EventStream()
        self.launched = launched(os.environ)
        self._num_nodes = self.launched.num_hosts or 1
        self._process_group_backend = process_group_backend
        self._run: build.RunContext | None = None
        self._agreement: Agreement | None = None
        self._placed = OpenLoaders()
        watch_parent()

    # -- who and where ------------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Without this, Lightning injects no sampler and drops ``sync_dist``; all ranks would see the same data."""
        return True

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Number of nodes the Trainer was given; under ``hierdist launch`` those of this round."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = self.launched.num_hosts or num_nodes

    @property
    def num_processes(self) -> int:
        """Number of ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Which part of the data this rank reads; ranks that share layers or a pipeline read the same."""
        if self._run is not None:
            replicas = build.replicas_of(self._run, self.parallel_config)
            return {"num_replicas": replicas.count, "rank": replicas.own}
        if self.parallel_config.splits or self.parallel_config.stages:
            raise ConfigError(
                "which ranks read the same data is known once they have met: ask in setup() or a loader's hook"
            )
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def process_group_backend(self) -> str | None:
        """Backend of the default process group."""
        return self._process_group_backend

    @property
    def run_context(self) -> build.RunContext | None:
        """The cluster, the seam and the store of the present run; ``None`` outside of one."""
        return self._run

    # -- starting -----------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self.start_method == "popen":
            self._launcher = RankLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = FunctionLauncher(self, start_method=self.start_method)  # type: ignore[arg-type]

    def set_world_ranks(self) -> None:
        """Tell the environment which rank this is; called by Lightning before and after launching."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for decorator in (rank_zero_only, fabric_rank_zero_only):
            decorator.rank = self.global_rank  # type: ignore[attr-defined]  # an attribute of a function

    def setup_environment(self) -> None:
        """Join the other ranks."""
        super().setup_environment()
        if self.launched.agent is not None and self.lightning_module is not None:
            heartbeat.attach(self.lightning_module.trainer)
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        self._process_group_backend = self._process_group_backend or _get_default_process_group_backend_for_device(
            self.root_device
        )
        self._meet(timedelta(seconds=self.sync_config.timeout_s))
        self.events.rank = self.global_rank
        if self._run is not None:  # a mode that outlives a call keeps what it is connected by
            return
        # Before the user's setup hooks run: what they raise can be told to the others, and what they ask of the loaders
        # (Trainer.estimated_stepping_batches) needs the ranks' agreement.
        self._run = build.open_run(self.topology_config, self.sync_config, events=self.events, device=self.root_device)
        if self.world_size > 1:
            self._agreement = build.open_agreement(self._run)

    def _meet(self, timeout: timedelta) -> None:
        """Make the default process group, unless there is one."""
        assert self.cluster_environment is not None
        options: dict[str, Any] = {"timeout": timeout}
        if self.root_device.type != "cpu":
            options["device_id"] = self.root_device
        if not dist.is_initialized() and self.launched.agent is None:
            store = open_agent_store(os.environ, timeout=timeout)
            options.update({} if store is None else {"store": store})
        _init_dist_connection(self.cluster_environment, str(self._process_group_backend), **options)

    def process_dataloader(self, dataloader: object) -> object:
        """Tell a loader of streamed data who reads, and in which epoch training is; others get patient workers."""
        if isinstance(dataloader, ShardedLoader) and self._run is not None:
            dataloader.place(build.replicas_of(self._run, self.parallel_config), self.events)
            if self.lightning_module is not None:
                dataloader.set_epoch(self.lightning_module.trainer.current_epoch)
            self._placed.add(dataloader)
        elif isinstance(dataloader, DataLoader):
            _auto_add_worker_init_fn(dataloader, self.global_rank)  # Lightning's, which adds none where there is one
            make_patient(dataloader)
        return dataloader

    def teardown(self) -> None:
        """End the workers of loaders."""
        self._placed.close()
        super().teardown()

    # -- between ranks ------------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if not dist.is_initialized():
            return
        with self._operation(f"barrier({name})" if name else "barrier"):
            watchful.barrier(_world(), self.root_device, self._seam)

    def broadcast(self, obj: BroadcastT, src: int = 0) -> BroadcastT:
        """Give every rank the object of rank ``src``."""
        if not dist.is_initialized():
            return obj
        objects = [obj]
        with self._operation("broadcast"):
            watchful.meet(_world(), self._seam)
            dist.broadcast_object_list(objects, src)
        return objects[0]

    def all_gather(self, tensor: torch.Tensor, group: Any | None = None, sync_grads: bool = False) -> torch.Tensor:
        """Gather a tensor of every rank; the result has a new first dim of the world size."""
        with self._operation("all_gather"):
            if dist.is_initialized():
                watchful.meet(group or _world(), self._seam)
            return super().all_gather(tensor, group=group, sync_grads=sync_grads)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Combine a tensor of every rank that reads other data; what is no tensor is returned as it is.

        The mean of whole numbers has a fraction: Lightning divides a sum by the mean number of samples. A rank that is
        not in the group keeps what it has.
        """
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if _is_mean(reduce_op) and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.to(torch.float32)
        if not dist.is_initialized():
            return tensor
        group = (self._data_group if group is None else group) or _world()
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            return tensor
        is_mean, is_small = _is_mean(reduce_op), tensor.dtype == torch.float16
        if is_mean and is_small:  # its sum may be too large
            tensor.div_(group.size())
        with self._operation("reduce"):
            watchful.all_reduce(tensor, dist.ReduceOp.SUM if is_mean else _named(reduce_op), group, self._seam)
        return tensor.div_(group.size()) if is_mean and not is_small else tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  # Lightning's name
        """Whether all ranks say yes, or any; also ranks that share layers, which :meth:`reduce` counts once."""
        said = torch.tensor(int(decision), device=self.root_device)
        number = int(self.reduce(said, group=dist.group.WORLD, reduce_op="sum"))
        return number == self.world_size if all else number > 0

    @property
    def _seam(self) -> Collectives | None:
        return None if self._run is None else self._run.collectives

    @contextlib.contextmanager
    def _operation(self, name: str) -> Generator[None, None, None]:
        with self._run.operation(name) if self._run is not None else contextlib.nullcontext():
            yield

    def _naming_failures(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around the user's code, and Lightning's, that may talk to other ranks."""
        return self._run.naming_failures(what) if self._run is not None else contextlib.nullcontext()

    @property
    def _data_group(self) -> dist.ProcessGroup | None:
        """The ranks whose values a reduction counts; ``None``: all, since each reads other data."""
        return None


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "asked for once there is one"
    return world


def _is_mean(reduce_op: Any) -> bool:
    return reduce_op == dist.ReduceOp.AVG or str(reduce_op).lower() in ("mean", "avg")


def _named(reduce_op: Any) -> Any:
    """As Lightning: an operation of torch's, or its name; ``None`` is the sum."""
    if reduce_op is None:
        return dist.ReduceOp.SUM
    return getattr(dist.ReduceOp, reduce_op.upper()) if isinstance(reduce_op, str) else reduce_op
