"""What is compared. Each arm trains a few steps on every rank and says how long each took and what crossed the link."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workload import Module, make_loader, make_model
from lightning_dist import HierDistStrategy
from tests.distributed.lightning_runs import trainer_on_pool
from tests.support.tasks import RankContext


@dataclass(frozen=True)
class Load:
    """What one step costs besides its communication.

    Attributes:
        batch: Rows of a batch.
        compute_s: Seconds of pretended compute a step.
        warmup: Steps not counted.
        steps: Steps counted.
        accumulation: Batches an optimizer step.
    """

    batch: int = 4
    compute_s: float = 0.0
    warmup: int = 1
    steps: int = 1
    accumulation: int = 1


@dataclass
class Measured:
    """One rank's view of an arm.

    Attributes:
        step_s: Seconds of each counted step.
        sent_bytes: Bytes this rank's host sent in the counted steps (of all its ranks).
        exchange_s: Seconds from this rank's first bucket to the end of its last, a step; ours only.
    """

    step_s: list[float]
    sent_bytes: int
    exchange_s: list[float] = field(default_factory=list)


class _Clock:
    """Marks the end of steps; between the marks around the counted steps, counts the link's bytes."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._marks: list[float] = []
        self._sent = [0, 0]

    def mark(self) -> None:
        self._marks.append(time.monotonic())
        if len(self._marks) == self._load.warmup:
            self._sent[0] = sent_bytes()
        if len(self._marks) == self._load.warmup + self._load.steps:
            self._sent[1] = sent_bytes()

    def measured(self) -> Measured:
        marks = self._marks[self._load.warmup - 1 :]
        steps = [late - early for early, late in itertools.pairwise(marks)]
        return Measured(steps, self._sent[1] - self._sent[0])


def sent_bytes() -> int:
    """Bytes this host's link has sent; 0 where there is no such link."""
    with open("/proc/thread-self/net/dev") as table:
        for line in table:
            name, _, counters = line.partition(":")
            if name.strip() == "eth0":
                return int(counters.split()[8])
    return 0


class _ClockCallback(pl.Callback):
    def __init__(self, clock: _Clock, accumulation: int) -> None:
        self._clock = clock
        self._accumulation = accumulation

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self._accumulation == 0:
            self._clock.mark()


def _lightning(context: RankContext, load: Load, strategy: Any) -> Measured:
    clock = _Clock(load)
    count = load.warmup + load.steps
    trainer = trainer_on_pool(
        context,
        strategy,
        max_steps=count,
        accumulate_grad_batches=load.accumulation,
        callbacks=[_ClockCallback(clock, load.accumulation)],
    )
    trainer.fit(Module(load.compute_s), make_loader(load.batch, count * load.accumulation))
    return clock.measured()


def lightning_ddp(context: RankContext, load: Load) -> Measured:
    """``Trainer(strategy="ddp")``."""
    return _lightning(context, load, "ddp")


def hierdist(context: RankContext, load: Load, sync: dict[str, Any] | None = None) -> Measured:
    """``Trainer(strategy="hierdist")``."""
    strategy = HierDistStrategy(sync={"timeout_s": 300.0, **(sync or {})})
    measured = _lightning(context, load, strategy)
    spans: dict[int, list[tuple[int, int]]] = {}
    for event in strategy.events.snapshot():
        if event.name in ("comm.reduce", "comm.cross", "comm.gather") and "bucket" in event.attributes:
            spans.setdefault(event.step, []).append((event.start_ns, event.end_ns))
    windows = [(max(e for _, e in s) - min(b for b, _ in s)) / 1e9 for _, s in sorted(spans.items())]
    measured.exchange_s = windows[load.warmup :]
    return measured


def hierdist_bf16(context: RankContext, load: Load) -> Measured:
    """``HierDistStrategy(sync="bf16")``."""
    return hierdist(context, load, {"codec": "bf16"})


def hierdist_powersgd(context: RankContext, load: Load) -> Measured:
    """``HierDistStrategy(sync="powersgd")``, rank 4."""
    return hierdist(context, load, {"algorithm": "powersgd"})


def hierdist_sockets(context: RankContext, load: Load) -> Measured:
    """Ours with the in-host legs over Gloo's loopback sockets, not through shared memory."""
    return hierdist(context, load, {"shared_memory": "off"})


def _loop(load: Load, model: torch.nn.Module, prepare: Callable[[], None] | None = None) -> Measured:
    """A bare training loop."""
    clock = _Clock(load)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    count = load.warmup + load.steps
    batches = iter(make_loader(load.batch, count * load.accumulation))
    for _ in range(count):
        if prepare is not None:
            prepare()
        optimizer.zero_grad()
        for batch in itertools.islice(batches, load.accumulation):
            (model(batch).pow(2).mean() / load.accumulation).backward()
        optimizer.step()
        clock.mark()
    return clock.measured()


def ddp_fp16(context: RankContext, load: Load) -> Measured:
    """DDP with torch's fp16 hook, which Lightning does not register on CPU, in a bare loop."""
    model = DistributedDataParallel(make_model(load.compute_s))
    model.register_comm_hook(None, fp16_compress_hook)
    return _loop(load, model)


def ddp_powersgd(context: RankContext, load: Load) -> Measured:
    """DDP with torch's PowerSGD hook, rank 4, in a bare loop; exact in its first two steps, as it insists on."""
    model = DistributedDataParallel(make_model(load.compute_s))
    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook)
    return _loop(load, model)


def fsdp2_hybrid(context: RankContext, load: Load) -> Measured:
    """FSDP2's hybrid shard on a mesh that knows the hosts, in a bare loop."""
    return _fsdp2_hybrid(load, torch.tensor(list(context.placement.as_dict().values())))


def fsdp2_hybrid_by_rank(context: RankContext, load: Load) -> Measured:
    """FSDP2's hybrid shard on the mesh that ``init_device_mesh`` makes, which goes by the ranks' numbers."""
    return _fsdp2_hybrid(load, torch.arange(context.world_size).view(len(context.placement.as_dict()), -1))


def _fsdp2_hybrid(load: Load, ranks: torch.Tensor) -> Measured:
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
    model = make_model(load.compute_s)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _loop(load, model)


def _fsdp2_flat(load: Load, *, keeps_parameters: bool) -> Measured:
    """FSDP2 over all ranks with its own collectives, in a bare loop."""
    model = make_model(load.compute_s)
    for block in model:
        fully_shard(block, reshard_after_forward=not keeps_parameters)
    fully_shard(model, reshard_after_forward=False)
    return _loop(load, model)


def fsdp2_zero2(context: RankContext, load: Load) -> Measured:
    """FSDP2 that keeps parameters between forward and backward: what ZeRO-2 does."""
    return _fsdp2_flat(load, keeps_parameters=True)


def fsdp2_zero3(context: RankContext, load: Load) -> Measured:
    """FSDP2 that gathers parameters for forward and again for backward: what ZeRO-3 does."""
    return _fsdp2_flat(load, keeps_parameters=False)


def _deepspeed(stage: int) -> Callable[[RankContext, Load], Measured]:
    def arm(context: RankContext, load: Load) -> Measured:
        import deepspeed  # not a dependency: `pip install deepspeed` before a scenario that compares with it

        model = make_model(load.compute_s)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": load.batch,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            },
        )
        clock = _Clock(load)
        for batch in make_loader(load.batch, load.warmup + load.steps):
            engine.backward(engine(batch).pow(2).mean())
            engine.step()
            clock.mark()
        return clock.measured()

    arm.__doc__ = f"DeepSpeed's ZeRO stage {stage} with its own defaults, in a bare loop."
    return arm


def _sharded(mode: str, **options: Any) -> Callable[[RankContext, Load], Measured]:
    def arm(context: RankContext, load: Load) -> Measured:
        strategy = HierDistStrategy(parallel={"mode": mode, **options}, sync={"timeout_s": 300.0})
        return _lightning(context, load, strategy)

    arm.__doc__ = f"``HierDistStrategy(parallel={ {'mode': mode, **options} })``."
    return arm


def compute_alone(context: RankContext, load: Load) -> Measured:
    """The same steps on all ranks with no synchronisation, started together."""
    return _loop(load, make_model(load.compute_s), prepare=dist.barrier)


def communication_alone(context: RankContext, load: Load) -> Measured:
    """Our all-reduce of buckets as large as the reducer's, all ready at once."""
    from tests.distributed.runs import opened

    clock = _Clock(load)
    size = sum(p.numel() for p in make_model().parameters())
    with opened(context, {"timeout_s": 300.0}) as (_, all_reduce):
        buckets = torch.ones(size).split(8 * (1 << 20) // 4)
        for _ in range(load.warmup + load.steps):
            for future in [all_reduce.start(bucket, mean=True) for bucket in buckets]:
                future.wait()
            clock.mark()
    return clock.measured()


ARMS: dict[str, Callable[[RankContext, Load], Measured]] = {
    "lightning_ddp": lightning_ddp,
    "hierdist": hierdist,
    "hierdist_bf16": hierdist_bf16,
    "hierdist_sockets": hierdist_sockets,
    "hierdist_powersgd": hierdist_powersgd,
    "ddp_fp16": ddp_fp16,
    "ddp_powersgd": ddp_powersgd,
    "fsdp2_hybrid": fsdp2_hybrid,
    "fsdp2_hybrid_by_rank": fsdp2_hybrid_by_rank,
    "fsdp2_zero2": fsdp2_zero2,
    "fsdp2_zero3": fsdp2_zero3,
    "hierdist_zero1": _sharded("zero1"),
    "hierdist_zero2": _sharded("zero2"),
    "hierdist_zero3": _sharded("zero3"),
    "hierdist_zero3_host": _sharded("zero3", secondary_shard="host"),
    "hierdist_hsdp": _sharded("hsdp"),
    "deepspeed_zero1": _deepspeed(1),
    "deepspeed_zero2": _deepspeed(2),
    "deepspeed_zero3": _deepspeed(3),
    "compute_alone": compute_alone,
    "communication_alone": communication_alone,
}


def run_arm(context: RankContext, name: str, load: Load) -> Measured:
    """Run one arm on this rank."""
    torch.set_num_threads(1)
    return ARMS[name](context, load)
