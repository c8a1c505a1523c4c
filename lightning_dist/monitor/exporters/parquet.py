"""A finished run as tables: ``steps.parquet``, ``samples.parquet`` and ``spans.parquet``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_dist.errors import ConfigError
from lightning_dist.monitor.record import Phase, RankRecord, RunRecord

if TYPE_CHECKING:
    import pyarrow as pa


def export_parquet(record: RunRecord, folder: Path) -> tuple[Path, ...]:
    """Write a run's steps, samples and kept spans of all ranks as tables, a row each.

    Moments are nanoseconds since 1970 (``wall_ns``), so that ranks share one axis; what was not measured is null. The
    run's facts are in the files' metadata, under the key ``hierdist``, as JSON.

    Args:
        record: The run.
        folder: Where to; made if it is not there.

    Returns:
        The files; each is whole, or as it was before.

    Raises:
        ConfigError: pyarrow is not installed.
        OSError: The folder cannot be written to.
    """
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError("Parquet needs the package pyarrow: pip install 'lightning-dist[monitor]'") from error
    folder.mkdir(parents=True, exist_ok=True)
    facts = json.dumps(vars(record.facts), default=str).encode()
    fresh: dict[Path, Path] = {}
    try:
        for name, schema, rows in _tables(record):
            path = folder / f"{name}.parquet"
            columns = {field.name: [row.get(field.name) for row in rows] for field in schema}
            table = _arrow().table(columns, schema=schema.with_metadata({"hierdist": facts}))
            fresh[path] = folder / f".{path.name}.{os.getpid()}"
            pq.write_table(table, fresh[path])
        for path, written in fresh.items():
            written.replace(path)
    finally:
        for written in fresh.values():
            written.unlink(missing_ok=True)
    return tuple(fresh)


def _arrow() -> Any:
    import pyarrow

    return pyarrow


def _tables(record: RunRecord) -> Iterable[tuple[str, pa.Schema, list[dict[str, Any]]]]:
    pa = _arrow()
    whole, number, text = pa.int64(), pa.float64(), pa.string()
    where = [("rank", pa.int32()), ("host", text), ("step", whole), ("wall_ns", whole)]
    tiers = pa.list_(pa.struct([("tier", text), ("total_s", number), ("exposed_s", number), ("size_bytes", whole)]))
    steps = pa.schema(
        [
            *where,
            ("duration_s", number),
            *((f"{phase.value}_s", number) for phase in Phase),
            ("communication_total_s", number),
            ("communication_exposed_s", number),
            ("communication_bytes", whole),
            ("communication_operations", whole),
            ("tiers", tiers),
            ("micro_batches", whole),
            ("samples", whole),
            ("tokens", whole),
            ("batch_bytes", whole),
            ("counters", pa.map_(text, number)),
        ]
    )
    samples = pa.schema([*where, ("metric", text), ("value", number)])
    spans = pa.schema([*where, ("lane", text), ("name", text), ("end_wall_ns", whole)])
    ranks = list(record.ranks.values())
    yield "steps", steps, [row for rank in ranks for row in _steps(rank)]
    yield "samples", samples, [row for rank in ranks for row in _samples(rank)]
    yield "spans", spans, [row for rank in ranks for row in _spans(rank)]


def _where(rank: RankRecord, step: int, wall_ns: int) -> dict[str, Any]:
    return {"rank": rank.header.rank, "host": rank.header.host, "step": step, "wall_ns": wall_ns}


def _steps(rank: RankRecord) -> Iterable[dict[str, Any]]:
    for step in rank.steps:
        row = _where(rank, step.step, rank.header.wall_ns(step.start_ns))
        row |= {name: getattr(step, name) for name in ("duration_s", "micro_batches", "samples", "tokens")}
        row |= {f"{phase.value}_s": seconds for phase, seconds in step.phases.items()}
        traffic = step.communication
        if traffic is not None:
            row |= {"communication_total_s": traffic.total_s, "communication_exposed_s": traffic.exposed_s}
            row |= {"communication_bytes": traffic.size_bytes, "communication_operations": traffic.operations}
        row["tiers"] = [
            {"tier": name, "total_s": tier.total_s, "exposed_s": tier.exposed_s, "size_bytes": tier.size_bytes}
            for name, tier in step.tiers.items()
        ]
        yield row | {"batch_bytes": step.batch_bytes, "counters": list(step.counters.items())}


def _samples(rank: RankRecord) -> Iterable[dict[str, Any]]:
    for sample in rank.samples:
        yield {**_where(rank, sample.step, sample.wall_ns), "metric": sample.metric, "value": sample.value}


def _spans(rank: RankRecord) -> Iterable[dict[str, Any]]:
    for span in rank.spans:
        row = _where(rank, span.step, rank.header.wall_ns(span.start_ns))
        yield row | {"lane": span.lane, "name": span.name, "end_wall_ns": rank.header.wall_ns(span.end_ns)}
