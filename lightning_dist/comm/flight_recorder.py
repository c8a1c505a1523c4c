"""What torch's flight recorder says of the operations between ranks that have not ended.

It is on by default (``TORCH_FR_BUFFER_SIZE``), for Gloo and NCCL alike, and can be asked from any thread while others
are blocked in a collective. So it also knows of operations that did not go through the seam.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch._C import _distributed_c10d

# Its recorder of operations on CPU, and that of operations on CUDA, which is there where torch was built with NCCL.
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def last_operation() -> str | None:
    """The operation that this process waits in, or has begun last; ``None``: the recorder has seen none."""
    entries = [entry for entry in _entries() if "time_created_ns" in entry]
    under_way = [entry for entry in entries if not _is_over(entry)]
    newest = max(under_way or entries, key=lambda entry: int(entry["time_created_ns"]), default=None)
    return None if newest is None else in_words(newest)


def in_words(entry: Mapping[str, Any]) -> str:
    """E.g. ``gloo:all_reduce, number 7 on group 'cross', sizes [[1024]], under way``.

    Args:
        entry: Of the recorder's JSON.
    """
    names = [str(name) for name in entry.get("process_group", ()) if name]
    number = entry.get("p2p_seq_id") if entry.get("is_p2p") else entry.get("collective_seq_id")
    sizes = entry.get("input_sizes") or entry.get("output_sizes")
    said = str(entry.get("profiling_name", "an operation"))
    said += f", number {number}" if number is not None else ""
    said += f" on group {names[-1]!r}" if names else ""
    said += f", sizes {sizes}" if sizes else ""
    return said + (", ended" if _is_over(entry) else ", under way")


def _is_over(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _entries() -> Iterator[Mapping[str, Any]]:
    for name in _DUMPS:
        dump = getattr(_distributed_c10d, name, None)
        if dump is None:
            continue
        # The recorder is no public API: what it cannot say is left out of a message, and nothing else depends on it.
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            yield from json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", ())
