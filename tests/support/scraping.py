"""What a Prometheus server reads."""

from __future__ import annotations

import urllib.request


def scraped(url: str) -> dict[str, float]:
    """Figures of an endpoint: ``name{labels}`` -> value."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}
