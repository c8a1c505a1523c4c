"""Starts a keeper: ``python -I -S lightning_dist/checkpoint/keeper/__main__.py NAME LIMIT_BYTES IDLE_S``.

Run as a file, not as a module: the package's own ``__init__`` imports torch, which takes seconds and hundreds of
megabytes that a keeper does not need. So the packages around this one are put in place without it.

It prints ``ready`` once somebody serves under the name, and goes on as a process of its own, with init for parent and
in a session of its own, so that neither a launcher that ends its children nor a terminal ends it.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path


def main() -> None:
    """See the module."""
    name, limit_bytes, idle_s = sys.argv[1:]
    folder = Path(__file__).resolve().parent
    packages = ("lightning_dist", "lightning_dist.checkpoint", "lightning_dist.checkpoint.keeper")
    for package, path in zip(packages, (folder.parents[1], folder.parent, folder), strict=True):
        module = types.ModuleType(package)
        module.__path__ = [str(path)]
        sys.modules[package] = module
    from lightning_dist.checkpoint.keeper.server import Server

    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    server = Server(name, limit_bytes=int(limit_bytes), idle_s=float(idle_s))
    is_serving = server.open()
    os.write(1, b"ready\n")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    if is_serving:
        server.serve()


if __name__ == "__main__":
    main()
