"""Where results go, and what is noted beside each: the date and the commit."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def today() -> str:
    """As YYYY-MM-DD, in UTC."""
    return datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()


def commit() -> str:
    """Short hash of what is checked out."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
