"""Each rank reads all data."""

from __future__ import annotations

from lightning_dist.monitor.diagnosis import already
from lightning_dist.monitor.diagnosis.causes import data_wait
from lightning_dist.monitor.diagnosis.claim import Claim
from lightning_dist.monitor.diagnosis.evidence import Evidence
from lightning_dist.monitor.record import Phase

READ_SHARE = 0.6  # of the readers: bytes read over bytes used come near their number if each reads all
LEAST_READ = 1.8  # times the bytes used; file formats and read-ahead alone explain less


def claim(evidence: Evidence) -> Claim | None:
    """Data wait, where ranks read what others read too."""
    if Phase.DATA_WAIT not in evidence.window.phases or not is_amplified(evidence):
        return None
    facts = _whole_set_facts(evidence)
    return Claim(
        cost_s=data_wait.wait_s(evidence),
        what="ranks wait for batches, and each reads data that others read too",
        evidence=(*facts, *_read_facts(evidence), *data_wait.sentences(evidence)),
        advice=_advice(evidence),
        directness=min(data_wait.directness(evidence), 0.95 if facts else 0.8),
    )


def is_amplified(evidence: Evidence) -> bool:
    """Whether ranks read more than they are given, or are all given the same."""
    readers = evidence.readers
    return readers is not None and readers > 1 and bool(_whole_set_facts(evidence) or _read_facts(evidence))


def _whole_set_facts(evidence: Evidence) -> tuple[str, ...]:
    """What says that each rank goes through the whole set."""
    sharded = evidence.facts("is_sharded")
    if True in sharded:
        return ()
    if False in sharded:
        names = sorted({str(name) for name in evidence.facts("sampler")})
        sampler = f" ({', '.join(names)})" if names else ""
        return (f"The loader does not deal samples to ranks{sampler}: each of {evidence.readers} reads all.",)
    length, own = evidence.numbers("dataset_length"), evidence.numbers("samples_per_epoch")
    if length and own and min(own) > READ_SHARE * max(length):
        return (f"Each rank goes through {min(own):.0f} of {max(length):.0f} samples in an epoch.",)
    return ()


def _read_facts(evidence: Evidence) -> tuple[str, ...]:
    """What says that more bytes are read than used."""
    factor, readers = evidence.read_amplification, evidence.readers
    if factor is None or readers is None or factor < max(LEAST_READ, READ_SHARE * readers):
        return ()
    return (
        f"Ranks read {factor:.1f} times the bytes of their batches; if each of {readers} reads all, it is "
        f"{readers} times.",
    )


def _advice(evidence: Evidence) -> tuple[str, ...]:
    if already.reads_shards(evidence):
        return (
            "What is read twice does not fit into the host's cache: a larger data.cache_limit, or a cache that the "
            "host's ranks share, on a local disk (data.cache_dir).",
        )
    skips = "an IterableDataset that skips other ranks' files before it opens them"
    deals = "" if _deals(evidence) else "a DistributedSampler (Trainer(use_distributed_sampler=True)), or "
    return (
        "Let each host read its part once: data=sharded, or ShardedDataModule, also under Lightning's ddp.",
        f"With a loader of your own: {deals}{skips}.",
    )


def _deals(evidence: Evidence) -> bool:
    """Whether Lightning would deal samples, if the loader had a sampler of the usual kind."""
    has_one = "DistributedSampler" in evidence.facts("sampler")
    return has_one or evidence.option("trainer.use_distributed_sampler") is True
