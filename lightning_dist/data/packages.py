"""Optional packages that formats need."""

from __future__ import annotations

import importlib
from typing import Any

from lightning_dist.errors import ForeignDataError


def needed(module: str, *, package: str, what: str) -> Any:
    """A module of an optional package.

    Args:
        module: To import.
        package: That pip installs.
        what: Needs it, for the message.

    Raises:
        ForeignDataError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ForeignDataError(
            f"{what} needs the package {package}: pip install {package}, or pip install 'lightning-dist[data]'"
        ) from error
