"""What a saved position remembers of the data, so that a run that is resumed with others is told what changed. Pure.

Of each data set: its counts, and digests of at most 256 groups of neighbouring shards. That is a few kilobytes whatever
the data, and enough to name the shards that differ up to their group.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from lightning_dist.data.index.dataset_index import DatasetIndex
from lightning_dist.errors import ChangedDataError, ForeignDataError

MOST_GROUPS = 256
VERSION = 1


class Group(NamedTuple):
    """Neighbouring shards.

    Attributes:
        first: Name of the first one.
        digest: Of their names and of the rows of their chunks; 16 hexadecimal digits.
    """

    first: str
    digest: str


@dataclass(frozen=True)
class DataSummary:
    """A data set in short.

    Attributes:
        fingerprint: Of its index.
        format: Name of its format.
        properties: What the format has to know.
        shards: How many.
        samples: How many.
        size_bytes: Of all chunks.
        group_size: Shards in a group.
        groups: All shards, the last group may have less.
    """

    fingerprint: str
    format: str
    properties: Mapping[str, Any]
    shards: int
    samples: int
    size_bytes: int
    group_size: int
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, index: DatasetIndex) -> DataSummary:
        """The summary of a data set; linear in its chunks."""
        group_size = max(1, -(-len(index.shards) // MOST_GROUPS))
        return cls(
            fingerprint=index.fingerprint,
            format=index.format,
            properties=dict(index.properties),
            shards=len(index.shards),
            samples=index.num_samples,
            size_bytes=index.size_bytes,
            group_size=group_size,
            groups=groups_of(index, group_size, len(index.shards)),
        )

    def counts(self) -> dict[str, int]:
        """What it has, by name."""
        return {"shards": self.shards, "samples": self.samples, "bytes": self.size_bytes}


@dataclass(frozen=True)
class DataIdentity:
    """What positions of an order mean.

    Attributes:
        order: What the order depends on besides the data, as plain values:
            :meth:`~lightning_dist.data.order.sample_order.SampleOrder.describe`.
        sources: The data sets.
    """

    order: Mapping[str, Any]
    sources: tuple[DataSummary, ...]

    @property
    def fingerprint(self) -> str:
        """Hash of what the order, and what its samples hold, depend on; 32 hexadecimal digits."""
        parts = [dict(self.order), [source.fingerprint for source in self.sources]]
        return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "order": dict(self.order),
            "sources": [
                asdict(source) | {"groups": [list(group) for group in source.groups]} for source in self.sources
            ],
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> DataIdentity:
        """The opposite of :meth:`to_dict`.

        Raises:
            ForeignDataError: It is of a later version, or something else.
        """
        if not isinstance(state, Mapping) or state.get("version") != VERSION:
            found = state.get("version") if isinstance(state, Mapping) else type(state).__name__
            raise ForeignDataError(f"a position of the data is of version {found!r}; this library reads {VERSION}")
        try:
            sources = [
                DataSummary(**{**source, "groups": tuple(Group(*group) for group in source["groups"])})
                for source in state["sources"]
            ]
            return cls(order=dict(state["order"]), sources=tuple(sources))
        except (KeyError, TypeError, ValueError) as error:
            raise ForeignDataError(f"a position of the data is damaged: {type(error).__name__}: {error}") from error


def check_unchanged(saved: DataIdentity, present: DataIdentity, indexes: Sequence[DatasetIndex]) -> None:
    """Refuse data or an order that are not those of a saved position.

    Args:
        saved: Of the position.
        present: Of the run.
        indexes: Those of the run's data sets.

    Raises:
        ChangedDataError: The message lists what changed.
    """
    if saved.fingerprint == present.fingerprint:
        return
    changes = [f"order: {change}" for change in _differences(saved.order, present.order)]
    if len(saved.sources) != len(present.sources):
        changes.append(f"there were {len(saved.sources)} data sets, there are {len(present.sources)}")
    for number, (old, new, index) in enumerate(zip(saved.sources, present.sources, indexes, strict=False)):
        name = "data" if len(saved.sources) == 1 else f"data set {number}"
        changes += [f"{name}: {change}" for change in _changes(old, new, index)]
    listed = "".join(f"\n- {change}" for change in changes)
    raise ChangedDataError(
        "the data or their order are not those that the position was saved with, so that what was not yet trained on "
        f"is not known:{listed}\nGive what the run began with, or start an epoch anew without the saved position"
    )


def groups_of(index: DatasetIndex, group_size: int, num_shards: int) -> tuple[Group, ...]:
    """Groups of the first ``num_shards`` shards of a data set."""
    by_shard = np.argsort(index.shard_of, kind="stable")
    shard_of = index.shard_of[by_shard]
    columns = [index.shard_of, index.starts, index.sizes, index.samples, index.crc32]
    rows = [None if column is None else np.ascontiguousarray(column[by_shard], dtype="<i8") for column in columns]
    firsts = np.append(np.arange(0, num_shards, group_size), num_shards)
    places = np.searchsorted(shard_of, firsts)
    groups = []
    for (first, end), (start, stop) in zip(_pairs(firsts), _pairs(places), strict=True):
        digest = hashlib.blake2b(json.dumps(index.shards[first:end]).encode(), digest_size=8)
        for row in rows:
            digest.update(b"-" if row is None else row[start:stop].tobytes())
        groups.append(Group(index.shards[first], digest.hexdigest()))
    return tuple(groups)


def _pairs(numbers: Any) -> list[tuple[int, int]]:
    return list(zip(numbers[:-1].tolist(), numbers[1:].tolist(), strict=True))


def _changes(old: DataSummary, new: DataSummary, index: DatasetIndex) -> list[str]:
    if old.fingerprint == new.fingerprint:
        return []
    changes = list(_differences({"format": old.format}, {"format": new.format}))
    changes += [f"property {change}" for change in _differences(old.properties, new.properties)]
    changes += _differences(old.counts(), new.counts())
    return changes + _changed_shards(old, index)


def _changed_shards(old: DataSummary, index: DatasetIndex) -> list[str]:
    """Which groups of the saved shards are not what they were; what was added at the end does not change them."""
    present = groups_of(index, old.group_size, min(old.shards, len(index.shards)))
    changed = [number for number, group in enumerate(old.groups) if list(present[number : number + 1]) != [group]]
    if not changed:
        return [f"the first {old.shards} shards are what they were"] if len(index.shards) > old.shards else []
    first, last = changed[0] * old.group_size, min((changed[-1] + 1) * old.group_size, old.shards)
    where = f"of shards {first} to {last - 1}, from {old.groups[changed[0]].first!r} on"
    return [f"{len(changed)} of {len(old.groups)} groups of shards differ in names, sizes or samples: {where}"]


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    """What differs between plain values, by dotted path."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = [*old, *(name for name in new if name not in old)]
        below = [(f"{path}.{name}" if path else str(name), old.get(name), new.get(name)) for name in names]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        below = [(f"{path}.{place}", *pair) for place, pair in enumerate(zip(old, new, strict=True))]
    else:
        return [] if old == new else [f"{path} was {old!r}, is {new!r}"]
    return [change for name, before, now in below for change in _differences(before, now, name)]
