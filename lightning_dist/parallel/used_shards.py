"""Parameters used where they are shards: sums over them come out whole, and what cannot be right says so.

Outside of a forward a parameter, and its gradient, is a ``DTensor``. Numbers computed from it (a norm for a logger) are
``DTensor`` too, which loggers and ``torch.tensor`` do not take; :class:`WholeNumbers` gathers them. A gradient that
autograd brings to a shard itself would be written over by the sum of the others, so it is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lightning_dist.errors import CombinationError
from lightning_dist.parallel.fsdp_groups import ShardedParam, name_of

_MIXED = "got mixed torch.Tensor and DTensor"
_NEED_VALUES = frozenset({"norm", "vector_norm", "max", "min", "amax", "amin"})  # of none torch has no maximum
_WAY_OUT = (
    "parameters are whole only inside their module's forward, under zero1 and zero2 from a step's first forward on. "
    "For a penalty on weights give the optimizer a weight_decay, or compute it in the forward of their module, "
    "or write parallel=ddp"
)


class WholeNumbers(TorchFunctionMode):
    """Inside, what torch's functions return is plain where it has no dimension, whatever it was computed from."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """See torch; collective where a number comes from shards."""
        if getattr(func, "__name__", "") in _NEED_VALUES:
            args = tuple(_some_on_each_rank(arg) for arg in args)
        result = func(*args, **(kwargs or {}))
        return result.full_tensor() if isinstance(result, DTensor) and result.dim() == 0 else result


def _some_on_each_rank(value: Any) -> Any:
    """A tensor with fewer rows than ranks is gathered: a rank's shard of it may have no value."""
    if isinstance(value, DTensor) and value.dim() > 0 and value.shape[0] < value.device_mesh.size():
        return value.full_tensor()
    return value


@contextlib.contextmanager
def explaining_shards() -> Iterator[None]:
    """Say in the user's words what torch says of shards that meet whole tensors.

    Raises:
        CombinationError: In place of torch's error.
    """
    with _explaining(f"a parameter was used outside of its module's forward, where it is a shard: {_WAY_OUT}"):
        yield


@contextlib.contextmanager
def explaining_parts() -> Iterator[None]:
    """Say in the user's words what torch says of split layers' parameters that meet whole tensors.

    Raises:
        CombinationError: In place of torch's error.
    """
    with _explaining(
        "a parameter of a split layer was used outside of that layer's forward, where it is a part: call the layer (an "
        "output layer tied to the embedding as nn.Linear with the same weight, instead of F.linear), give the "
        "optimizer a weight_decay instead of a penalty, write 'replicate' for the layer, or parallel=zero3 without "
        "parallel.tensor.size"
    ):
        yield


@contextlib.contextmanager
def _explaining(instead: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if _MIXED not in str(error):
            raise
        raise CombinationError(instead) from error


def refuse_direct_gradients(params: Iterable[ShardedParam]) -> list[RemovableHandle]:
    """Let a backward that reaches a shard itself end in an error; FSDP2 sets gradients of shards without autograd."""
    return [_refuse_for(param) for param in params]


def _refuse_for(param: ShardedParam) -> RemovableHandle:
    def refuse(gradient: torch.Tensor) -> NoReturn:
        raise CombinationError(
            f"the loss depends on {name_of(param)} outside of its module's forward, where it is a shard: {_WAY_OUT}"
        )

    shard = param.sharded_param
    wanted = shard.requires_grad
    shard.requires_grad_(True)  # torch takes hooks only then; it may be unfrozen later
    handle: RemovableHandle = shard.register_hook(refuse)
    shard.requires_grad_(wanted)
    return handle
