"""The libraries that ours is compared with, imported once, before ranks are forked. None of them is a dependency:

    pip install --no-deps -r benchmarks/data/peers.txt

``--no-deps``, because MosaicML Streaming asks for older versions of NumPy than it needs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
import warnings
from typing import Any

os.environ.setdefault("LITDATA_DISABLE_VERSION_CHECK", "1")  # else it asks the package index at each start

PEERS = ("litdata", "streaming", "webdataset")


def missing(package: str) -> bool:
    """Whether a package is not installed."""
    return importlib.util.find_spec(package) is None


def import_streaming() -> Any:
    """MosaicML Streaming without its image data sets, which need torchvision."""
    sys.modules.setdefault("streaming.vision", types.ModuleType("streaming.vision"))
    return importlib.import_module("streaming")


def import_all() -> None:
    """Those that are installed."""
    for package in PEERS:
        if not missing(package):
            import_streaming() if package == "streaming" else importlib.import_module(package)


def quiet() -> None:
    """The libraries' advice would be in the way of the figures."""
    warnings.simplefilter("ignore")
