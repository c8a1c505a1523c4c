"""``detect_anomaly`` asks of every gradient whether it holds a NaN, which DTensor cannot answer (torch 2.13).

Each rank answers for its own part: the rank that has the NaN raises, and the others learn of it as of any error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@contextmanager
def anomalies_found_in_parts() -> Iterator[None]:
    """Around forward and backward; may be entered inside itself. Does nothing unless anomalies are looked for."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    asked = torch.ops.aten._is_any_true.default
    if not torch.is_anomaly_enabled() or asked in handlers:
        yield
        return
    handlers[asked] = _any_in_part
    try:
        yield
    finally:
        handlers.pop(asked, None)


def _any_in_part(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found: Tensor = op_call(args[0].to_local(), *args[1:], **kwargs)
    return found
