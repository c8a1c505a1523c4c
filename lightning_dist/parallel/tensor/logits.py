"""Logits that stay split over the vocabulary, and a loss that is computed on the parts.

Inside :meth:`SplitLogits.kept` the output layer returns logits of which each rank holds a part, as a DTensor with the
whole shape. ``F.cross_entropy`` (and so ``nn.CrossEntropyLoss``) of them is computed on the parts, by
:func:`torch.distributed.tensor.parallel.loss_parallel`, and comes out as a plain tensor. Operations that only view,
cut or cast leave them split; for any other the logits are gathered first, so its result is a plain tensor too, and
right. Changing them in place is refused: it would change the gathered copy only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F  # noqa: N812  # the name everybody uses
from torch.overrides import TorchFunctionMode

from lightning_dist.errors import CombinationError

_MARK = "_hierdist_split_logits"

# Reading what a tensor is, and hooks: on the tensor itself, never on a copy. "__get__" is any attribute (shape, grad).
_NATIVE = {
    *("__get__", "__set__", "__len__", "size", "dim", "ndimension", "numel", "stride", "element_size"),
    *("is_floating_point", "is_contiguous", "requires_grad_", "retain_grad", "register_hook", "backward"),
}
_VIEWS = {
    *("view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim", "squeeze", "unsqueeze"),
    *("__getitem__", "narrow", "select", "unbind", "split", "chunk", "contiguous", "detach", "clone"),
    *("float", "double", "half", "bfloat16", "to"),
}


class SplitLogits:
    """Whether logits stay split now. Entering twice is entering once, e.g. for a backward inside a training step."""

    def __init__(self) -> None:
        self._depth = 0

    @property
    def are_kept(self) -> bool:
        """Whether the output layer may leave its logits split."""
        return self._depth > 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around what computes the loss from the logits, and around its backward."""
        self._depth += 1
        try:
            if self._depth > 1:
                yield
                return
            # torch's manager has no `finally`: an error thrown into it would leave its handlers behind (2.13).
            manager = loss_parallel()
            manager.__enter__()
            try:
                with _LogitsMode():
                    yield
            finally:
                manager.__exit__(None, None, None)
        finally:
            self._depth -= 1


def mark(logits: DTensor) -> DTensor:
    """Declare that a DTensor holds logits that are split over the vocabulary."""
    setattr(logits, _MARK, True)
    return logits


class _LogitsMode(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not any(_is_split(value) for value in _flat((*args, *kwargs.values()))):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _NATIVE or (name in _VIEWS and _only_views(name, args, kwargs)):
            return _settled(func(*args, **kwargs))
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or _is_augmented(name):
            raise CombinationError(
                f"logits that are split over ranks cannot be changed in place ({name}); write an operation that "
                "returns a new tensor, or turn loss_parallel off"
            )
        if func is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        args, kwargs = gathered(args), gathered(kwargs)
        return func(*args, **kwargs)


def _cross_entropy(logits: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """F.cross_entropy on the parts where torch knows how, else on the gathered logits; a plain tensor."""
    class_dim = 1 if logits.dim() > 1 else 0
    can_stay_split = (
        _is_split(logits)
        and cast(DTensor, logits).placements == (Shard(class_dim),)
        and not target.is_floating_point()
        and set(kwargs) <= {"weight", "ignore_index", "reduction"}
        and len(args) <= 1
    )
    if can_stay_split:
        return cast(DTensor, F.cross_entropy(logits, target, *args, **kwargs)).full_tensor()
    return F.cross_entropy(gathered(logits), gathered(target), *gathered(args), **gathered(kwargs))


def _only_views(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if name == "to":
        return all(isinstance(value, torch.dtype | bool) for value in (*args[1:], *kwargs.values()))
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(item is None or item is Ellipsis or isinstance(item, int | slice) for item in index)
    return True


def _is_augmented(name: str) -> bool:
    """``__iadd__`` and its like, whose result Python binds to the name again."""
    return name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__")


def _is_split(value: object) -> bool:
    return isinstance(value, DTensor) and getattr(value, _MARK, False)


def _settled(value: Any) -> Any:
    """What became of split logits: still split, and marked, or no longer, and plain."""
    if type(value) in (list, tuple):
        return type(value)(_settled(item) for item in value)
    if not isinstance(value, DTensor):
        return value
    if all(isinstance(placement, Shard) for placement in value.placements):
        return mark(value)
    return value.full_tensor()


def gathered(value: Any) -> Any:
    """The value with split logits in it, at any depth of lists, tuples and dicts, made whole; collective."""
    if _is_split(value):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: gathered(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(gathered(item) for item in value)
    return value


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value
