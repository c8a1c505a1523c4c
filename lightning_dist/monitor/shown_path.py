"""How a path is printed."""

from __future__ import annotations

from pathlib import Path


def shown_path(path: Path) -> Path:
    """As it would be written in the working directory, if it lies below and that is still there."""
    try:
        here = Path.cwd()
    except OSError:
        return path
    return path.relative_to(here) if path.is_relative_to(here) else path
