"""Tests of many cases: some run always, all in ``make sweep``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest


def sampled(cases: Mapping[str, tuple[Any, ...]], always: Collection[str]) -> list[Any]:
    """Parameters of a test, for ``pytest.mark.parametrize``; the others are marked ``sweep``.

    Args:
        cases: Name -> arguments.
        always: Names of those that run always.
    """
    unknown = set(always) - set(cases)
    if unknown:
        raise ValueError(f"no cases: {sorted(unknown)}")
    return [
        pytest.param(*arguments, id=name, marks=() if name in always else pytest.mark.sweep)
        for name, arguments in cases.items()
    ]
