"""What hosts have reached at their best, a file a host, in a folder that they may share."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

_SUFFIX = ".json"


def figures_file(folder: Path, host: str) -> Path:
    """Where those of a host are.

    Args:
        folder: Of all hosts.
        host: Its name, whatever is in it.
    """
    return folder / f"{quote(host, safe='')}{_SUFFIX}"


def known_figures(path: Path) -> dict[str, float]:
    """Nothing, if they are not there or cannot be read: they are written anew."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): float(value) for name, value in known.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def figures_of_others(path: Path) -> dict[str, dict[str, float]]:
    """Those of the other hosts in its folder, by the names of their files.

    Args:
        path: This host's.
    """
    try:
        others = [other for other in sorted(path.parent.glob(f"*{_SUFFIX}")) if other != path]
    except OSError:
        return {}
    return {other.name.removesuffix(_SUFFIX): known_figures(other) for other in others}


def keep_figures(path: Path, figures: Mapping[str, float]) -> None:
    """Write a host's; without a word if that cannot be: the disk's check has said what there is to say."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(figures), encoding="utf-8")
        os.replace(fresh, path)
