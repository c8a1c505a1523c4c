"""Hierarchical reduce-scatter and all-gather: shard r belongs to rank r, for any placement, type and length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dist import build
from lightning_dist.comm.codecs import codec_of
from lightning_dist.comm.scattered import HierarchicalScatter
from lightning_dist.config import SyncConfig, TopologyConfig
from lightning_dist.errors import CollectiveError
from lightning_dist.events import EventStream
from tests.distributed.test_all_reduce import LAYOUTS, SWITCHES
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

DTYPES = ["float32", "bfloat16", "float16", "int64", "bool"]


def values(rank: int, numel: int, dtype: str) -> torch.Tensor:
    return ((torch.arange(numel) * 7 + rank * 3) % 5).to(getattr(torch, dtype))


def open_run(context: RankContext, topology: dict[str, Any] | None = None) -> build.RunContext:
    config, events = SyncConfig(timeout_s=20.0), EventStream(rank=context.rank)
    return build.open_run(TopologyConfig(**(topology or {})), config, events=events, device=torch.device("cpu"))


def open_scatter(run: build.RunContext, **arguments: Any) -> HierarchicalScatter:
    return HierarchicalScatter(
        run.cluster,
        collectives=run.collectives,
        device=run.device,
        store=run.own_store("shards"),
        timeout_s=20.0,
        **{"chunk_bytes": 1024, **arguments},
    )


def scatter_and_gather(
    context: RankContext, topology: dict[str, Any], chunk_bytes: int, shares_memory: bool
) -> list[str]:
    """Both operations on every type and some lengths, all under way at once; what is wrong, in words."""
    run = open_run(context, topology)
    scatter = open_scatter(run, chunk_bytes=chunk_bytes, shares_memory=shares_memory)
    n, problems, checks = context.world_size, [], []
    try:
        if scatter.shares_memory != (shares_memory and context.local_world_size > 1):
            problems.append(f"shares_memory: {scatter.shares_memory}")
        for dtype in DTYPES:
            for length in (501, 1, 0):
                whole = values(context.rank, n * length, dtype)
                shard = torch.zeros(length, dtype=whole.dtype)
                every = torch.zeros(n, length, dtype=whole.dtype)
                checks.append((dtype, length, scatter.reduce_scatter(shard, whole)))
                scatter.all_gather(every, values(100 + context.rank, length, dtype)).wait()
                if not torch.equal(every, torch.stack([values(100 + r, length, dtype) for r in range(n)])):
                    problems.append(f"all_gather {dtype}[{length}]")
        for dtype, length, future in checks:
            terms = [values(r, n * length, dtype).view(n, length)[context.rank] for r in range(n)]
            expected = torch.stack(terms).any(0) if dtype == "bool" else sum(terms).to(terms[0].dtype)
            if not torch.equal(future.wait(), expected):
                problems.append(f"reduce_scatter {dtype}[{length}]")
        strided = torch.arange(n * 6.0).view(6, n).t()
        mean = scatter.reduce_scatter(torch.empty(3, 2), strided * (context.rank + 1), mean=True).wait()
        if not torch.allclose(mean, strided.reshape(n, 3, 2)[context.rank] * (n + 1) / 2):
            problems.append("mean of a non-contiguous tensor")
        large = torch.full((n * 3,), 60000.0, dtype=torch.float16)
        if not torch.isfinite(
            scatter.reduce_scatter(torch.empty(3, dtype=torch.float16), large, mean=True).wait()
        ).all():
            problems.append("fp16 mean overflows")
    finally:
        scatter.close()
        run.close()
    return problems


@pytest.mark.parametrize(
    ("chunk_bytes", "shares_memory"),
    [(1 << 20, True), (1024, True), (1024, False)],
    ids=["one chunk", "chunks", "chunks over sockets"],
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_shard_r_belongs_to_rank_r(ranks: RankPool, name: str, chunk_bytes: int, shares_memory: bool) -> None:
    topology = {"switches": SWITCHES[name]} if name in SWITCHES else {}
    for problems in ranks.run(scatter_and_gather, layout=LAYOUTS[name], args=(topology, chunk_bytes, shares_memory)):
        assert problems == []


def scatter_in_parts(context: RankContext, parts: list[list[int]]) -> list[str]:
    """Shard i of a part belongs to its i-th member, whatever its rank."""
    run = open_run(context)
    scatter, problems = open_scatter(run, parts=parts), []
    (own,) = [part for part in parts if context.rank in part]
    n, index = len(own), own.index(context.rank)
    try:
        if (list(scatter.members), scatter.index) != (own, index):
            problems.append(f"members {scatter.members}, index {scatter.index}")
        mean = scatter.reduce_scatter(torch.zeros(700), values(context.rank, n * 700, "float32"), mean=True).wait()
        expected = sum(values(r, n * 700, "float32").view(n, 700)[index] for r in own) / n
        if not torch.allclose(mean, expected):
            problems.append("reduce_scatter")
        every = scatter.all_gather(torch.zeros(n, 5), torch.full((5,), float(context.rank))).wait()
        if every[:, 0].tolist() != own:
            problems.append(f"all_gather {every[:, 0].tolist()}")
    finally:
        scatter.close()
        run.close()
    return problems


PARTS = {
    "reversed": [[3, 1, 2, 0]],
    "halves": [[0, 1], [2, 3]],
    "crossed": [[0, 2], [3, 1]],
    "uneven": [[2, 0, 1], [3]],
    "alone": [[0], [1], [2], [3]],
}
ALWAYS = [
    *("2+2-reversed", "3+1-reversed", "cyclic-halves", "3+1-halves", "2+2-crossed", "cyclic-crossed"),
    *("2+2-uneven", "cyclic-uneven", "3+1-alone"),
]


@pytest.mark.parametrize(
    ("name", "parts"),
    sampled({f"{n}-{p}": (n, parts) for n in ("2+2", "3+1", "cyclic") for p, parts in PARTS.items()}, ALWAYS),
)
def test_parts_of_the_world_scatter_by_themselves(ranks: RankPool, name: str, parts: list[list[int]]) -> None:
    for problems in ranks.run(scatter_in_parts, layout=LAYOUTS[name], args=(parts,)):
        assert problems == []


def scatter_either_way(context: RankContext) -> list[str]:
    """Sums that rounding tells apart, through shared memory and over sockets; where they differ."""
    run, n, problems = open_run(context), context.world_size, []
    in_memory, over_sockets = (open_scatter(run, shares_memory=shares) for shares in (True, False))
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            whole = torch.randn(n * 700, generator=torch.Generator().manual_seed(context.rank)).to(dtype)
            sums = [
                scatter.reduce_scatter(torch.zeros(700, dtype=dtype), whole, mean=True).wait()
                for scatter in (in_memory, over_sockets)
            ]
            problems += [] if torch.equal(*sums) else [str(dtype)]
    finally:
        in_memory.close()
        over_sockets.close()
        run.close()
    return problems


@pytest.mark.parametrize("name", ["3", "2+2"])
def test_sums_do_not_depend_on_how_a_host_exchanges(ranks: RankPool, name: str) -> None:
    for problems in ranks.run(scatter_either_way, layout=LAYOUTS[name]):
        assert problems == []


def gather_into_place(context: RankContext) -> tuple[bool, bool]:
    """A shard that lies where it is gathered, and a gather of what a step writes next; whether all came."""
    run = open_run(context)
    scatter, n = open_scatter(run), context.world_size
    try:
        every = torch.zeros(n, 700)
        every[context.rank] = context.rank + 1
        in_place = scatter.all_gather(every, every[context.rank]).wait()
        steps = []
        for step in range(5):  # more than there are slots
            shard = torch.full((700,), float(step * n + context.rank))
            steps.append(scatter.all_gather(torch.zeros(n, 700), shard).wait()[:, 0])
    finally:
        scatter.close()
        run.close()
    expected = torch.arange(5.0 * n).view(5, n)
    return in_place[:, -1].tolist() == list(range(1, n + 1)), torch.equal(torch.stack(steps), expected)


@pytest.mark.parametrize("name", ["2", "cyclic", "3+1"])
def test_shards_are_gathered_in_place_and_again(ranks: RankPool, name: str) -> None:
    assert ranks.run(gather_into_place, layout=LAYOUTS[name]) == [(True, True)] * sum(map(len, LAYOUTS[name].values()))


def scatter_encoded(context: RankContext) -> tuple[float, float]:
    """Largest relative errors of a reduce-scatter and a gather with bf16 between hosts."""
    run = open_run(context)
    scatter = open_scatter(run, codec=codec_of(SyncConfig(codec="bf16")))
    n = context.world_size
    terms = [torch.randn(n * 500, generator=torch.Generator().manual_seed(r)).abs() + 1 for r in range(n)]
    try:
        total = scatter.reduce_scatter(torch.zeros(500), terms[context.rank]).wait()
        exact = torch.stack(terms).double().sum(0).view(n, 500)[context.rank]
        whole = scatter.all_gather(torch.zeros(n * 500), terms[0].view(n, 500)[context.rank]).wait()
    finally:
        scatter.close()
        run.close()
    return float(((total - exact) / exact).abs().max()), float((whole - terms[0]).abs().max())


def test_a_codec_rounds_what_crosses_hosts_and_nothing_else(ranks: RankPool) -> None:
    for sum_error, gather_error in ranks.run(scatter_encoded, layout=LAYOUTS["2+2"]):
        assert 1e-5 < sum_error < 2**-8  # the other host's half of the sum has 8 bits
        assert gather_error == 0
    for sum_error, _ in ranks.run(scatter_encoded, layout=LAYOUTS["3"]):
        assert sum_error < 1e-6  # one host: nothing crosses


def ask_differently(context: RankContext) -> str:
    """What the ranks that disagree with rank 0 are told."""
    run = open_run(context)
    scatter = open_scatter(run)
    size = 3 if context.rank == 1 else 2
    try:
        scatter.all_gather(torch.zeros(context.world_size, size), torch.zeros(size)).wait()
    except CollectiveError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        scatter.close()
        run.close()
    return ""


def test_other_sizes_are_refused(ranks: RankPool) -> None:
    said = ranks.run(ask_differently, layout=LAYOUTS["2"], fresh=True, deadline_s=60)
    assert "rank 1" in said[1]
    assert "asks for everybody's 3 x float32 as operation 0 (all_gather)" in said[1]
