"""Whether ranks share a data set, or each reads all of it; from facts alone, whatever it costs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lightning_dist.monitor.record import RunRecord, Sample

_WHOLE = 0.9  # of the data set that a rank must have read or hold to have read it all


def reading_note(record: RunRecord) -> str | None:
    """A sentence if each rank reads the whole data set; ``None``: it does not, or nobody knows.

    It does if its loader deals all samples to every rank, if its data set holds all samples in every rank's memory, or,
    where that is not to be seen, if each rank has read about as many bytes as the data set has.
    """
    ranks = list(record.ranks.values())
    if len(ranks) < 2:
        return None
    facts = [rank.header.facts for rank in ranks]
    name = facts[0].get("dataset") or "the data set"
    if all(each.get("is_sharded") is False for each in facts):
        sampler = facts[0].get("sampler")
        return (
            f"data: each of {len(ranks)} ranks goes through all samples of {name} ({sampler}): N-fold reading, and N "
            "times the same samples in an epoch. Write Trainer(use_distributed_sampler=True), or data=sharded"
        )
    length, mine = facts[0].get("dataset_length"), facts[0].get("samples_per_epoch")
    held = [each.get("held_bytes") or 0 for each in facts]
    if min(held) > 0 and length and mine and mine < _WHOLE * length:
        return (
            f"data: each of {len(ranks)} ranks holds all of {name} ({min(held):,} bytes) and trains on {mine:,} of its "
            f"{length:,} samples: read {len(ranks)} times. data=sharded reads it once a host"
        )
    size = facts[0].get("dataset_bytes")
    if not size or any(each.get("is_sharded") is not None for each in facts):
        return None
    read = [_bytes_read(rank.series("read_bytes")) for rank in ranks]
    if min(read) <= _WHOLE * size:
        return None
    return (
        f"data: each of {len(ranks)} ranks has read {min(read):,.0f} bytes or more, and {name} has {size:,}: read "
        f"{sum(read) / size:.1f} times. data=sharded reads it once a host"
    )


def _bytes_read(samples: Sequence[Sample]) -> float:
    """The rates times the seconds between them."""
    return sum(sample.value * (sample.wall_ns - before.wall_ns) / 1e9 for before, sample in pairwise(samples))
