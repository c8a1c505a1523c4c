"""What a run does already: nobody is told to do it. What is unknown counts as not done."""

from __future__ import annotations

from collections import Counter

from lightning_dist.monitor.diagnosis.evidence import SHARDED_MODES, Evidence

_NARROW = ("bf16", "int8", "onebit", "topk")
_SHARDING = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")  # Lightning's


def shards_optimizer(evidence: Evidence) -> bool:
    """Whether each rank steps a part of the parameters."""
    return evidence.option("parallel.mode") in SHARDED_MODES or evidence.record.facts.strategy in _SHARDING


def sends_half(evidence: Evidence) -> bool:
    """Whether gradients cross between hosts in 16 bits or fewer."""
    codec = evidence.option("sync.codec") or evidence.option("sync.wire_dtype")  # its name in older records
    if codec in _NARROW or "16" in str(evidence.option("ddp.comm_hook")):
        return True
    return str(evidence.option("trainer.precision")) in ("bf16-true", "16-true", "transformer-engine")


def reads_shards(evidence: Evidence) -> bool:
    """Whether the loader is ours, from which each host reads its part once."""
    loaders = evidence.facts("loader")
    return bool(loaders) and all(loader == "ShardedLoader" for loader in loaders)


def pins_memory(evidence: Evidence) -> bool:
    """Whether batches are put into pinned memory."""
    pinned = evidence.facts("pin_memory")
    return evidence.option("data.pin_memory") is True or (bool(pinned) and all(each is True for each in pinned))


def workers(evidence: Evidence) -> int | None:
    """Processes or threads that read for a rank; ``None``: unknown."""
    given = evidence.option("data.workers")
    found = [given] if given is not None else evidence.facts("workers")
    return next((each for each in found if isinstance(each, int) and not isinstance(each, bool)), None)


def has_enough_cores(evidence: Evidence) -> bool:
    """Whether the threads of each host's ranks fit on its cores."""
    threads: Counter[str] = Counter()
    cores: dict[str, int] = {}
    for record in evidence.record.ranks.values():
        header = record.header
        here, mine = header.facts.get("cpu_cores"), header.facts.get("threads")
        if not isinstance(here, int) or not isinstance(mine, int):
            return False
        threads[header.host] += mine
        cores[header.host] = here
    return all(count <= cores[host] for host, count in threads.items())
