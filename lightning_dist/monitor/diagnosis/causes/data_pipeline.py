"""Ranks wait for batches."""

from __future__ import annotations

from lightning_dist.monitor.diagnosis import already
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
        if already.pins_memory(evidence):
            return ("Batches are pinned already: move fewer bytes, e.g. uint8 that the device converts.",)
        return (
            "Batches move while the device computes with data.pin_memory=true, or pin_memory=True in a DataLoader.",
        )
    workers = already.workers(evidence)
    now = "" if workers is None else f" (now {workers})"
    more = 2 * workers if workers is not None and workers >= MANY_WORKERS else MANY_WORKERS
    return (
        f"Read ahead with more workers: data.workers={more}{now}, or num_workers={more} in a DataLoader.",
        *_of_storage(evidence),
        *_of_decoding(evidence),
    )


def _of_storage(evidence: Evidence) -> tuple[str, ...]:
    if already.reads_shards(evidence):
        return ("If storage is the limit: fetch further ahead (data.fetch_threads, data.fetch_ahead).",)
    return (
        "If storage is the limit: data=sharded (ShardedDataModule) fetches ahead into a cache of the host "
        "(data.fetch_threads, data.fetch_ahead, data.cache_dir).",
    )


def _of_decoding(evidence: Evidence) -> tuple[str, ...]:
    once = "decode once and store the result (hierdist data write for text)."
    if evidence.option("data.readers") == "processes":
        return (f"If decoding is: {once}",)
    return (f"If decoding is: data.readers=processes, or {once}",)
