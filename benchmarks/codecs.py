"""What encoding for the slow leg costs: each codec's time for a chunk, on one thread.

    python -m benchmarks.codecs

Medians of calls, the codecs in turn. Results go to ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.record import RESULTS, commit, today
from lightning_dist.comm.codecs import Codec, codec_of
from lightning_dist.config import MIB, SyncConfig

ARMS = {
    "bf16": SyncConfig(codec="bf16"),
    "int8": SyncConfig(codec="int8"),
    "int8, stochastic": SyncConfig(codec="int8", rounding="stochastic"),
    "onebit": SyncConfig(codec="onebit"),
    "topk 1 %": SyncConfig(codec="topk", ratio=0.01),
}
CHUNK_BYTES = 2 * MIB


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="calls of each (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS / f"{today()}-codecs.json")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    values = torch.randn(1, CHUNK_BYTES // 4, generator=torch.Generator().manual_seed(0))
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ARMS}
    for _ in range(asked.rounds):
        for name, sync in ARMS.items():
            codec = codec_of(sync)
            assert codec is not None, "all of these encode"
            for spent, taken in zip(times[name], _turn(codec, values), strict=True):
                spent.append(taken)
    figures = {
        name: {"encode_ms": statistics.median(encode), "decode_ms": statistics.median(decode)}
        for name, (encode, decode) in times.items()
    }
    table = Table("codec", "encode, ms", "decode, ms", title=f"{CHUNK_BYTES // MIB} MiB of fp32, one thread")
    for name, figure in figures.items():
        table.add_row(name, *(f"{each:.2f}" for each in figure.values()))
    Console().print(table)
    result = {"date": today(), "commit": commit(), "chunk_bytes": CHUNK_BYTES, "rounds": asked.rounds}
    asked.output.write_text(json.dumps({**result, "codecs": figures}, indent=1) + "\n")
    return 0


def _turn(codec: Codec, values: torch.Tensor) -> tuple[float, float]:
    """Milliseconds to encode, and to decode."""
    encoded, encode_ms = _timed(lambda: codec.encode(values, seed=1))
    _, decode_ms = _timed(lambda: codec.decode(encoded, values.shape[1]))
    return encode_ms, decode_ms


def _timed(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    start = time.perf_counter()
    result = call()
    return result, (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    sys.exit(main())
