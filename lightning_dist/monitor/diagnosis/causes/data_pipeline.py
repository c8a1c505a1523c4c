"""Ranks wait for batches."""

from __future__ import annotations

from lightning_dist.monitor.diagnosis.causes import data_wait, io_amplification
from lightning_dist.monitor.diagnosis.claim import Claim
from lightning_dist.monitor.diagnosis.evidence import Evidence
from lightning_dist.monitor.record import Phase

MANY_WORKERS = 4  # what one with fewer is told to take; one with as many, to double them


def claim(evidence: Evidence) -> Claim | None:
    """Data wait and the move to the device, unless ranks read more than they use."""
    if Phase.DATA_WAIT not in evidence.window.phases or io_amplification.is_amplified(evidence):
        return None
    return Claim(
        cost_s=data_wait.wait_s(evidence),
        what="ranks wait for batches",
        evidence=data_wait.sentences(evidence),
        advice=_advice(evidence),
        directness=data_wait.directness(evidence),
    )


def _advice(evidence: Evidence) -> tuple[str, ...]:
    if data_wait.move_dominates(evidence):
        return (
            "Batches move while the device computes with data.pin_memory=true, or pin_memory=True in a DataLoader.",
        )
    workers = evidence.option("data.workers")
    if workers is None:
        workers = next(iter(evidence.facts("workers")), None)
    now = "" if workers is None else f" (now {workers})"
    more = 2 * workers if isinstance(workers, int) and workers >= MANY_WORKERS else MANY_WORKERS
    return (
        f"Read ahead with more workers: data.workers={more}{now}, or num_workers={more} in a DataLoader.",
        "If storage is the limit: data=sharded (ShardedDataModule) fetches ahead into a cache of the host "
        "(data.fetch_threads, data.fetch_ahead, data.cache_dir).",
        "If decoding is: data.readers=processes, or decode once and store the result (hierdist data write for text).",
    )
