"""Checkpoints as tables for a terminal."""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from lightning_dist.checkpoint.catalog import Checkpoint, Found
from lightning_dist.checkpoint.compare import Difference
from lightning_dist.checkpoint.keeper.summary import Summary
from lightning_dist.checkpoint.manifest import Manifest


def of_folder(found: Sequence[Found], root: str) -> Table:
    """What a folder of checkpoints holds."""
    table = Table(title=root, title_justify="left")
    for heading in ("checkpoint", "step", "committed", "size", "files", "ranks", "state"):
        table.add_column(heading, justify="right" if heading in ("step", "size", "files", "ranks") else "left")
    for entry in found:
        state = "whole" if entry.problem is None else str(entry.problem)
        if entry.checkpoint is None:
            table.add_row(entry.name, "", "", "", "", "", state)
            continue
        manifest = entry.checkpoint.manifest
        step, size, files = str(manifest.record.get("step", "")), size_text(manifest.size_bytes), len(manifest.files)
        ranks = len({file.rank for file in manifest.files.values()})
        table.add_row(entry.name, step, time_text(manifest.created_s), size, str(files), str(ranks), state)
    return table


def of_checkpoint(checkpoint: Checkpoint) -> list[Table]:
    """What a checkpoint holds, and who wrote it."""
    manifest = checkpoint.manifest
    return [_record(checkpoint), _tensors(manifest), _objects(manifest), _files(manifest)]


def of_differences(differences: Sequence[Difference]) -> Table:
    """What differs between two checkpoints."""
    table = Table(title="differences", title_justify="left")
    for heading in ("name", "first", "second"):
        table.add_column(heading)
    for difference in differences:
        table.add_row(difference.name, difference.first, difference.second)
    return table


def of_keepers(summaries: Sequence[Summary], now_s: float) -> Table:
    """What the keepers of a host hold.

    Args:
        summaries: Of the keepers.
        now_s: Seconds since 1970.
    """
    table = Table(title="keepers of this host", title_justify="left")
    for heading in ("checkpoints of", "process", "held", "limit", "ranks", "steps", "age"):
        table.add_column(heading, justify="left" if heading in ("checkpoints of", "steps") else "right")
    for each in summaries:
        steps = ", ".join("?" if step is None else str(step) for step in each.steps)
        age = "" if each.newest_s is None else age_text(now_s - each.newest_s)
        sizes = size_text(each.used_bytes), size_text(each.limit_bytes)
        table.add_row(each.job, str(each.process), *sizes, str(each.ranks), steps, age)
    return table


def age_text(seconds: float) -> str:
    """A time that has passed, in the largest unit of which there is one."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def size_text(size_bytes: int) -> str:
    """A size with a unit of powers of ten."""
    size, units = float(size_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def time_text(seconds: float) -> str:
    """A time in the machine's zone."""
    return datetime.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _record(checkpoint: Checkpoint) -> Table:
    manifest = checkpoint.manifest
    table = Table("key", "value", title=checkpoint.folder.url, title_justify="left")
    table.add_row("committed", time_text(manifest.created_s))
    table.add_row("size", size_text(manifest.size_bytes))
    for key, value in manifest.record.items():
        for name, inner in value.items() if isinstance(value, Mapping) else [("", value)]:
            table.add_row(f"{key}.{name}" if name else key, _text(inner))
    return table


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_text(inner)}" for key, inner in value.items())
    return str(value)


def _tensors(manifest: Manifest) -> Table:
    table = Table("tensor", "type", "shape", "size", "chunks", "written by rank", title="tensors", title_justify="left")
    tied: dict[str, list[str]] = defaultdict(list)
    for name, target in manifest.aliases.items():
        tied[target].append(name)
    for name, entry in manifest.tensors.items():
        ranks = sorted({manifest.files[chunk.place.file].rank for chunk in entry.chunks})
        shape = " x ".join(map(str, entry.shape)) or "-"
        table.add_row(name, entry.dtype, shape, size_text(entry.size_bytes), str(len(entry.chunks)), _numbers(ranks))
        for other in tied[name]:
            table.add_row(other, "", "", "0 B", "", f"tied to {name}")
    return table


def _objects(manifest: Manifest) -> Table:
    table = Table("object", "size", "written by rank", title="objects", title_justify="left")
    for name, place in manifest.objects.items():
        table.add_row(name, size_text(place.size), str(manifest.files[place.file].rank))
    return table


def _files(manifest: Manifest) -> Table:
    table = Table("file", "rank", "host", "size", "crc32", title="files", title_justify="left")
    for name, entry in manifest.files.items():
        table.add_row(name, str(entry.rank), entry.host, size_text(entry.size), f"{entry.crc32:08x}")
    return table


def _numbers(ranks: Sequence[int]) -> str:
    """Ranks with runs shortened: 0-3,7."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    return ",".join("-".join(map(str, run)) for run in runs)
