"""Which elements of which parameters the gradients of a group of FSDP2 are, so that what is lost can be kept."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_dist.comm.feedback import Origin, Span
from lightning_dist.parallel.fsdp_groups import ParamGroup, ShardedParam, name_of, trained


def origin_of_sum(group: ParamGroup, key: str, *, num_shards: int, weight: float) -> Origin:
    """Of the tensor that a group hands over to be summed, shard by shard.

    Args:
        group: Its trained parameters take part.
        key: Of the group.
        num_shards: Ranks that share the shards.
        weight: What an element counts in the mean gradient.
    """
    spans = tuple(span for shard in range(num_shards) for span in _spans_of_shard(group, shard))
    return Origin(key, spans, weight)


def origin_of_shard(group: ParamGroup, key: str, *, shard: int, weight: float) -> Origin:
    """Of one shard of the sum, which crosses to other replicas; arguments as for :func:`origin_of_sum`."""
    return Origin(f"{key}, across", tuple(_spans_of_shard(group, shard)), weight)


def span_of_shard(param: ShardedParam, shard: int) -> Span:
    """Of one parameter, which is whole but for the sharding: split layers are never encoded in blocks."""
    rows, whole = param.padded_sharded_param_size[0], param._orig_size[0]
    row = param._orig_size[1:].numel()
    low, high = min(shard * rows, whole), min((shard + 1) * rows, whole)
    return Span(name_of(param), low * row, (high - low) * row)


def _spans_of_shard(group: ParamGroup, shard: int) -> Iterator[Span]:
    for param in trained(group):
        span = span_of_shard(param, shard)
        yield span
        padding = param.padded_sharded_param_size.numel() - span.length
        if padding:
            yield Span(None, 0, padding)
