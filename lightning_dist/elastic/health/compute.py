"""Whether this host's cores compute right, and how fast.

Note: what is compared.
    The factors hold small whole numbers, so that their product is exact in fp32 whatever the order of summation. It is
    computed by the vector units (numpy's BLAS) on each core in turn, and once in 64-bit integers, which no BLAS takes
    part in. Speed is counted in the thread's own time, not by the clock: a core that is shared with others is not slow.
"""

from __future__ import annotations

import os
import time

import numpy as np

from lightning_dist.elastic.health.findings import Outcome
from lightning_dist.elastic.health.request import Request

_SIZE = 256
_LARGEST = 16  # 256 * 15 * 15 is far below 2**24


def check_compute(request: Request) -> Outcome:
    """A known product on each core, as far as the time goes."""
    random = np.random.default_rng(20240501)
    left, right = (random.integers(0, _LARGEST, (_SIZE, _SIZE)) for _ in range(2))
    expected = (left @ right).astype(np.float32)
    left32, right32 = left.astype(np.float32), right.astype(np.float32)
    allowed = os.sched_getaffinity(0)
    findings: list[str] = []
    best_flops = 0.0
    end_s = time.monotonic() + request.limits.compute_s
    try:
        for core in sorted(allowed):
            os.sched_setaffinity(0, {core})
            wrong, flops = _product_on_this_core(left32, right32, expected)
            best_flops = max(best_flops, flops)
            if wrong:
                findings.append(f"core {core} computed {wrong} of {expected.size} values of a known product wrong")
            if time.monotonic() > end_s:
                break
    finally:
        os.sched_setaffinity(0, allowed)
    return Outcome(tuple(findings), {"compute_flops": best_flops})


def _product_on_this_core(left: np.ndarray, right: np.ndarray, expected: np.ndarray) -> tuple[int, float]:
    """Wrong values, and operations a second."""
    wrong, best_flops = 0, 0.0
    for _ in range(3):
        begin_ns = time.thread_time_ns()
        product = left @ right
        seconds = max(time.thread_time_ns() - begin_ns, 1000) / 1e9
        wrong = max(wrong, int(np.count_nonzero(product != expected)))
        best_flops = max(best_flops, 2 * _SIZE**3 / seconds)
    return wrong, best_flops
