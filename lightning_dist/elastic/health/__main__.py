"""Checks this host: ``python lightning_dist/elastic/health/__main__.py``, with a request on its standard input.

Run as a file, not as a module: the package's own ``__init__`` imports torch, which takes seconds. So the packages
around this one are put in place without it. It prints a line of JSON when a check begins and another when it has ended.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path


def main() -> None:
    """See the module."""
    folder = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != folder]  # its modules are no top-level ones
    root = folder.parents[1]
    for package in ("", ".config", ".elastic", ".elastic.leading"):
        path = root.joinpath(*package.split("."))
        package = f"lightning_dist{package}"
        module = types.ModuleType(package)
        module.__path__ = [str(path)]
        sys.modules[package] = module
    from lightning_dist.elastic.health.checks import CHECKS
    from lightning_dist.elastic.health.findings import Outcome
    from lightning_dist.elastic.health.request import Request

    request = Request.from_text(sys.stdin.read())
    for name, check in CHECKS.items():
        _print({"begins": name})
        try:
            outcome = check(request)
        except Exception as error:  # a check that fails is a finding
            outcome = Outcome((f"it failed: {type(error).__name__}: {error}",))
        _print({"ended": name, **dataclasses.asdict(outcome)})


def _print(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
