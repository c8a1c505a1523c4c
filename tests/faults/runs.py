"""What the fault tests run on ranks: sums in a loop, with a plan of faults, and how each rank's run ended."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_dist import build
from lightning_dist.build.groups import GroupMaker
from lightning_dist.comm.collectives import FaultPoint
from lightning_dist.config import SyncConfig, TopologyConfig
from lightning_dist.errors import HierDistError
from lightning_dist.events import EventStream
from tests.distributed.runs import opened
from tests.support.faults import Fault, FaultPlan, end_stopped, strikes
from tests.support.tasks import RankContext

OPENING = "opening the gradients' groups"
HOSTS = {"a": [0, 1], "b": [2, 3]}
TIMEOUT_S = 2.5
GRACE_S = TIMEOUT_S / 2  # in which ranks tell each other what they saw
LOAD_S = 12.0
"""What a busy machine may add. Added to ours it is less than the 20 s that torch's own group and store would wait."""
SYNC: dict[str, Any] = {"timeout_s": TIMEOUT_S, "chunk_bytes": 1 << 16, "bucket_bytes": 1 << 16}
STEPS = 4
CHUNKS = 5
NUMEL = (CHUNKS * (1 << 16) - 1000) // 4


@dataclass(frozen=True)
class Ending:
    """How a rank's run ended.

    Attributes:
        error: Class of what was raised; empty if nothing was.
        text: Its message.
        after_s: From the first strike to the error, in seconds.
        close_s: How long it took to close everything, in seconds.
        threads: Names of our threads that were left then.
    """

    error: str = ""
    text: str = ""
    after_s: float = 0.0
    close_s: float = 0.0
    threads: tuple[str, ...] = ()


def assert_accused(ending: Ending, rank: int, host: str) -> None:
    """The error is of our tree, in time, and says who is lost, where, in which operation."""
    assert ending.error in ("PeerLostError", "CollectiveTimeoutError", "CollectiveMismatchError"), ending
    assert ending.after_s < TIMEOUT_S + 2 * GRACE_S + LOAD_S, ending
    assert re.search(
        rf"(Lost: [^.]*|Waited for: |does not answer: |ended with an error of its own: .*)rank {rank} \(host {host}\)",
        ending.text,
    ), ending.text
    assert re.search(r"(all_reduce|reduce_scatter|all_gather|opening [^:]*) on group", ending.text), ending.text


def assert_closed(ending: Ending) -> None:
    """Everything was given back within seconds."""
    assert ending.close_s < LOAD_S, ending
    assert ending.threads == (), ending


def after_meeting(context: RankContext, point: FaultPoint) -> Callable[[str, str, int], None]:
    """A fault point at which all ranks meet where they open the gradients' groups, before anybody is struck there.

    A rank that is struck earlier may hold the store that others still connect to, who then can name no host.
    """

    def meet_and_reach(operation: str, group: str, rank: int) -> None:
        if operation == OPENING:
            meet(context, "opening")
        point(operation, group, rank)

    return meet_and_reach


def meet(context: RankContext, where: str) -> None:
    """Wait for the others to come here, or for what a busy machine may take; without the ranks' own connections."""
    (context.tmp_path / f"{where}-{context.rank}").touch()
    end = time.monotonic() + LOAD_S
    others = [context.tmp_path / f"{where}-{other}" for other in range(context.world_size)]
    while not all(other.exists() for other in others) and time.monotonic() < end:
        time.sleep(0.005)


def sum_until_failure(
    context: RankContext, faults: Sequence[Fault], sync: dict[str, Any] | None = None, pace_s: float = 0.0
) -> Ending:
    """Sum a tensor a few times and check it; ``pace_s`` makes each step take a while."""

    def open_steps(stack: contextlib.ExitStack, point: FaultPoint) -> Callable[[], None]:
        _, all_reduce = stack.enter_context(opened(context, {**SYNC, **(sync or {})}, fault_point=point))

        def step() -> None:
            tensor = (torch.arange(NUMEL) % 16).float() * (context.rank + 1)
            all_reduce.all_reduce(tensor)
            expected = (torch.arange(NUMEL) % 16).float() * sum(range(1, context.world_size + 1))
            assert torch.equal(tensor, expected)

        return step

    return _until_failure(context, faults, open_steps, pace_s=pace_s)


def shard_until_failure(context: RankContext, faults: Sequence[Fault], sync: dict[str, Any] | None = None) -> Ending:
    """Sum a tensor into shards and gather them, a few times, and check it."""
    n = context.world_size
    config = SyncConfig(**{**SYNC, **(sync or {})})

    def open_steps(stack: contextlib.ExitStack, point: FaultPoint) -> Callable[[], None]:
        run = build.open_run(
            TopologyConfig(),
            config,
            events=EventStream(rank=context.rank),
            device=torch.device("cpu"),
            fault_point=point,
        )
        stack.callback(run.close)
        scatter = GroupMaker(run, config, mode="zero2").scatter([range(n)], "shards")
        stack.callback(scatter.close)

        def step() -> None:
            whole = (torch.arange(NUMEL // n * n) % 16).float()
            shard = torch.empty(NUMEL // n)
            scatter.reduce_scatter(shard, whole * (context.rank + 1)).wait()
            every = scatter.all_gather(torch.empty_like(whole), shard).wait()
            assert torch.equal(every, whole * sum(range(1, n + 1)))

        return step

    return _until_failure(context, faults, open_steps)


def _until_failure(
    context: RankContext,
    faults: Sequence[Fault],
    open_steps: Callable[[contextlib.ExitStack, FaultPoint], Callable[[], None]],
    *,
    pace_s: float = 0.0,
) -> Ending:
    point = after_meeting(context, FaultPlan(faults).point(context.rank, context.tmp_path))
    lost = {fault.rank for fault in faults if fault.kind in ("kill", "stop")}
    survivors = [rank for rank in range(context.world_size) if rank not in lost]
    dist.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=20))
    ending = Ending()
    with contextlib.ExitStack() as stack:
        try:
            step = open_steps(stack, point)
            if not any(fault.operation == OPENING for fault in faults):
                meet(context, "opened")  # who is struck in the first step may hold the store that others connect to
            for _ in range(STEPS):
                point("step", "main", context.rank)
                time.sleep(pace_s)
                step()
        except Exception as error:
            kind = type(error).__name__ if isinstance(error, HierDistError) else f"foreign {type(error).__name__}"
            struck_s = [strike.at_s for strike in strikes(context.tmp_path)]
            ending = Ending(kind, str(error), time.monotonic() - min(struck_s, default=time.monotonic()))
        start_s = time.monotonic()
    close_s = time.monotonic() - start_s
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
    end_stopped(context.tmp_path, rank=context.rank, survivors=survivors, deadline_s=20)
    return Ending(ending.error, ending.text, ending.after_s, close_s, _threads_left(within_s=3.0))


def sum_of(context: RankContext, sizes: Sequence[int], dtypes: Sequence[str], sync: dict[str, Any]) -> Ending:
    """One sum, of a size and a type that may differ between ranks."""
    dist.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=20))
    with opened(context, {**SYNC, **sync}) as (_, all_reduce):
        agreed = torch.ones(NUMEL)
        all_reduce.all_reduce(agreed)
        start_s = time.monotonic()
        try:
            all_reduce.all_reduce(torch.ones(sizes[context.rank], dtype=getattr(torch, dtypes[context.rank])))
        except Exception as error:
            return Ending(type(error).__name__, str(error), time.monotonic() - start_s)
    return Ending()


def sum_until_cut_off(context: RankContext, signal_path: str, steps: int, timeout_s: float) -> Ending:
    """Sum again and again; ``signal_path`` appears when all are at it, and holds the time when a link was pulled."""
    dist.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=20))
    ending, signal = Ending(), Path(signal_path)
    with opened(context, {**SYNC, "timeout_s": timeout_s}) as (_, all_reduce):
        try:
            for step in range(steps):
                all_reduce.all_reduce(torch.ones(NUMEL))
                time.sleep(0.02)
                if step == 5 and context.rank == 0:
                    signal.touch()
        except Exception as error:
            pulled_s = float(signal.read_text() or time.monotonic())
            ending = Ending(type(error).__name__, str(error), time.monotonic() - pulled_s)
        start_s = time.monotonic()
    return Ending(ending.error, ending.text, ending.after_s, time.monotonic() - start_s)


def _threads_left(*, within_s: float) -> tuple[str, ...]:
    end = time.monotonic() + within_s
    while True:
        left = tuple(thread.name for thread in threading.enumerate() if thread.name.startswith("hierdist"))
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.02)
