"""The hierarchical all-reduce against sums that are known exactly, for any placement, type and shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.runs import opened
from tests.support.ranks import RankPool
from tests.support.sweeps import sampled
from tests.support.tasks import RankContext

LAYOUTS: dict[str, dict[str, list[int]]] = {
    "1": {"a": [0]},
    "2": {"a": [0, 1]},
    "3": {"a": [0, 1, 2]},
    "1+1": {"a": [0], "b": [1]},
    "2+2": {"a": [0, 1], "b": [2, 3]},
    "cyclic": {"a": [0, 2], "b": [1, 3]},
    "3+1": {"a": [0, 1, 2], "b": [3]},
    "1+3": {"a": [1], "b": [0, 2, 3]},
    "2x2x2 switches": {"a": [0, 1], "b": [2, 3], "c": [4, 5], "d": [6, 7]},
    "uneven switches": {"a": [0, 1], "b": [2], "c": [3, 4, 5]},
}
SWITCHES = {
    "2x2x2 switches": {"x": ["a", "b"], "y": ["c", "d"]},
    "uneven switches": {"x": ["a", "c"], "y": ["b"]},
}
SMALL_CHUNKS = {"chunk_bytes": 4096, "bucket_bytes": 4096}  # encoded ones are not larger than a bucket
DTYPES = ["float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool", "complex64"]


def value_of(rank: int, shape: list[int], dtype: str) -> torch.Tensor:
    """Small integers, so that any order of summation gives the same in every type."""
    numel = int(torch.tensor(shape).prod()) if shape else 1
    values = (torch.arange(numel) * 7 + rank * 3) % 5
    return values.reshape(shape).to(getattr(torch, dtype))


def reduce_all(context: RankContext, sync: dict[str, Any], topology: dict[str, Any]) -> list[str]:
    """Every type and shape through one opening, in order; what is wrong, in words."""
    problems = []
    cases = [(dtype, shape) for dtype in DTYPES for shape in ([1000], [7, 3], [], [0], [1])]
    with opened(context, sync, topology) as (_, all_reduce):
        tensors = [value_of(context.rank, shape, dtype) for dtype, shape in cases]
        strided = value_of(context.rank, [30, 20], "float32").t()[::2, 1:]
        futures = [all_reduce.start(tensor) for tensor in [*tensors, strided]]
        for future in futures:
            future.wait()
        for (dtype, shape), got in zip(cases, tensors, strict=True):
            terms = [value_of(rank, shape, dtype) for rank in range(context.world_size)]
            expected = torch.stack(terms).any(0) if dtype == "bool" else sum(terms).to(got.dtype)
            if not torch.equal(got, expected):
                problems.append(f"{dtype}{shape}")
        full = sum(value_of(rank, [30, 20], "float32") for rank in range(context.world_size))
        if not torch.equal(strided, full.t()[::2, 1:]):
            problems.append("non-contiguous")
    return problems


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_sum_is_exact_for_any_placement_type_and_shape(ranks: RankPool, name: str, shared_memory: str) -> None:
    sync = {"chunk_bytes": 4096, "shared_memory": shared_memory}
    topology = {"switches": SWITCHES[name]} if name in SWITCHES else {}
    for problems in ranks.run(reduce_all, layout=LAYOUTS[name], args=(sync, topology)):
        assert problems == []


OTHERS: dict[str, dict[str, Any]] = {
    "flat": {"algorithm": "flat"},
    "bf16": {"codec": "bf16"},
    "everywhere": {"codec": "bf16", "everywhere": True},
}


@pytest.mark.parametrize(
    ("name", "sync"),
    [
        *((name, OTHERS[way]) for name in ("1", "2", "cyclic", "3+1") for way in OTHERS),
        *((name, OTHERS["everywhere"]) for name in SWITCHES),
    ],
)
def test_other_ways_are_exact_on_small_integers(ranks: RankPool, name: str, sync: dict[str, Any]) -> None:
    for problems in ranks.run(reduce_all, layout=LAYOUTS[name], args=({**SMALL_CHUNKS, **sync}, {})):
        assert problems == []


def mean_of_noise(context: RankContext, sync: dict[str, Any], dtype: str, scale: float) -> torch.Tensor:
    """The mean of random values over ranks, several chunks and a ragged end."""
    generator = torch.Generator().manual_seed(context.rank)
    tensor = (torch.randn(10_007, generator=generator, dtype=torch.float64) * scale).to(getattr(torch, dtype))
    with opened(context, {**SMALL_CHUNKS, **sync}) as (_, all_reduce):
        return all_reduce.all_reduce(tensor, mean=True)


def noise(rank: int, dtype: str, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(10_007, generator=generator, dtype=torch.float64) * scale).to(getattr(torch, dtype)).double()


WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "sockets": {"shared_memory": "off"},
    "flat": {"algorithm": "flat"},
    "bf16": {"codec": "bf16"},
    "int8": {"codec": "int8", "rounding": "stochastic"},
    "onebit": {"codec": "onebit"},
    "topk": {"codec": "topk", "ratio": 0.25},
    "everywhere": {"codec": "int8", "everywhere": True},
}
MEANS: dict[str, tuple[str, str, float]] = {
    "float32": ("auto", "float32", 1e-6),
    "float32-sockets": ("sockets", "float32", 1e-6),
    "float32-flat": ("flat", "float32", 1e-6),
    "bfloat16": ("auto", "bfloat16", 2**-7),
    "float16": ("auto", "float16", 2**-9),
    "float32-bf16": ("bf16", "float32", 2**-7),
    "float32-int8": ("int8", "float32", 6 / 127),  # two roundings of less than a step, 3 hosts' sum below 6
    "bfloat16-int8": ("int8", "bfloat16", 6 / 127 + 2**-7),
    "float64-onebit": ("onebit", "float64", 8),  # of each value only the sign is kept
    "float32-topk": ("topk", "float32", 2),  # what is small is not sent
    "float32-everywhere": ("everywhere", "float32", 6 / 127),  # three roundings to nearest
    "float16-everywhere": ("everywhere", "float16", 6 / 127 + 2**-9),
}
ALWAYS = {
    "2": ["float32", "float32-sockets", "bfloat16", "float32-everywhere"],
    "2+2": ["float32-flat", "float16", "float32-bf16", "float32-int8", "float32-topk"],
    "3+1": list(MEANS),
    "cyclic": ["float32", "float32-sockets", "float32-bf16"],
    "1+1": ["float32", "float32-flat", "float16"],
}


@pytest.mark.parametrize(
    ("name", "sync", "dtype", "tolerance"),
    sampled(
        {f"{n}-{case}": (n, WAYS[w], d, t) for n in ALWAYS for case, (w, d, t) in MEANS.items()},
        [f"{name}-{case}" for name, cases in ALWAYS.items() for case in cases],
    ),
)
def test_mean_is_over_ranks_and_the_same_bits_everywhere(
    ranks: RankPool, name: str, sync: dict[str, Any], dtype: str, tolerance: float
) -> None:
    got = ranks.run(mean_of_noise, layout=LAYOUTS[name], args=(sync, dtype, 1.0))
    world_size = len(got)
    expected = sum(noise(rank, dtype, 1.0) for rank in range(world_size)) / world_size
    assert all(torch.equal(got[0], other) for other in got[1:])
    torch.testing.assert_close(got[0].double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "sync"),
    sampled(
        {f"{name}-{way}": (name, sync) for name in ("2", "2+2", "3+1", "1+1") for way, sync in WAYS.items()},
        [*(f"3+1-{way}" for way in WAYS), "2-auto", "2-sockets", "2+2-flat", "1+1-bf16"],
    ),
)
def test_fp16_means_do_not_overflow(ranks: RankPool, name: str, sync: dict[str, Any]) -> None:
    """Values whose sum is beyond fp16's 65504 but whose mean is not."""
    got = ranks.run(mean_of_noise, layout=LAYOUTS[name], args=(sync, "float16", 12000.0))
    assert all(torch.isfinite(values).all() for values in got)


@pytest.mark.parametrize("algorithm", ["flat", "hierarchical"])
def test_on_one_host_nothing_is_rounded(ranks: RankPool, algorithm: str) -> None:
    sync = {"algorithm": algorithm, "codec": "bf16"}
    got = ranks.run(mean_of_noise, layout=LAYOUTS["2"], args=(sync, "float32", 1.0))
    expected = sum(noise(rank, "float32", 1.0) for rank in range(2)) / 2
    torch.testing.assert_close(got[0].double(), expected, rtol=1e-6, atol=1e-6)
