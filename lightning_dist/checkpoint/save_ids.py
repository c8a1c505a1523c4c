"""Ids of saves, and the names of files that hold them. Pure.

Several saves may have files in one folder: the one that is committed, one that is being written over it, and what is
left of those that were cut off or given up, whose ranks may even write on. Ids put them in order: a save that begins
takes a larger one than any it finds. Where two begin before either has a file there, their clocks decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_DIGITS = 26  # hexadecimal: 8 that count saves, 14 of microseconds since 1970, 4 at random
_FILE = re.compile(rf"(?:rank\d+-([0-9a-f]{{{_DIGITS}}})\.bin|manifest-([0-9a-f]{{{_DIGITS}}})\.json)")
_ID = re.compile(rf"[0-9a-f]{{{_DIGITS}}}")


def next_save_id(names: Iterable[str], *, now_s: float, token: int) -> str:
    """Of a save that begins.

    Args:
        names: In its folder.
        now_s: Seconds since 1970.
        token: At random.
    """
    count = max((int(found[:8], 16) for found in map(save_id_of, names) if found is not None), default=0)
    return f"{count + 1:08x}{int(now_s * 1e6):014x}{token & 0xFFFF:04x}"


def save_id_of(name: str) -> str | None:
    """Of the save that a file belongs to; ``None`` for a file that is no save's."""
    found = _FILE.fullmatch(name)
    return None if found is None else found[1] or found[2]


def is_save_id(text: str) -> bool:
    """Whether a text is one."""
    return _ID.fullmatch(text) is not None


def shard_file(rank: int, save_id: str) -> str:
    """What a rank writes."""
    return f"rank{rank:05d}-{save_id}.bin"


def manifest_file(save_id: str) -> str:
    """What the coordinator writes before it commits."""
    return f"manifest-{save_id}.json"


def is_manifest(name: str) -> bool:
    """Whether a file is one."""
    return name.startswith("manifest-") and save_id_of(name) is not None
