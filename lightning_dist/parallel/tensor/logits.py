"""Logits that stay split over the vocabulary, and a loss that is computed on the parts.

Inside :meth:`SplitLogits.kept` the output layer returns logits of which each rank holds a part, as a DTensor with the
whole shape. ``F.cross_entropy`` (and so ``nn.CrossEntropyLoss``) of them is computed on the parts, by
:func:`torch.distributed.tensor.parallel.loss_parallel`, and comes out as a plain tensor. Operations that only view,
cut or cast leave them split; for any other the logits are gathered first, so its result is a plain tensor too, and
right. Changing them in place is refused: it would change the gathered copy only.

Note: lists of pieces.
    The backward of DTensor's ``split``, ``chunk`` and ``unbind`` fails unless every piece has a gradient (torch 2.13).
    Pieces are therefore cut out one by one.
"""

from __future__ import annotations

import inspect
import itertools
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
    *("__getitem__", "narrow", "select", "contiguous", "detach", "clone"),
    *("float", "double", "half", "bfloat16", "to"),
}
_PIECES = {"unbind", "split", "chunk"}
_CROSS_ENTROPY = inspect.signature(F.cross_entropy)
_ON_PARTS = frozenset({"input", "target", "weight", "ignore_index", "reduction"})


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
        if name in _NATIVE:
            return _settled(func(*args, **kwargs))
        if name in _VIEWS and _only_views(name, args, kwargs):
            return _view(func, args, kwargs)
        if name in _PIECES and args and _is_split(args[0]):
            return _pieces(func, args, kwargs)
        if _is_split(kwargs.get("out")) or (_changes_its_first(name) and _is_split(args[0])):
            raise CombinationError(
                f"logits that are split over ranks cannot be changed in place ({name}); write an operation that "
                "returns a new tensor, or turn loss_parallel off"
            )
        if func is F.cross_entropy:
            return _cross_entropy(args, kwargs)
        args, kwargs = gathered(args), gathered(kwargs)
        return func(*args, **kwargs)


def _cross_entropy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """F.cross_entropy on the parts where torch knows how, else on the gathered logits; a plain tensor."""
    given = _CROSS_ENTROPY.bind(*args, **kwargs)
    given.apply_defaults()  # torch hands over every argument, those that the user left out too
    logits, target = given.arguments["input"], given.arguments["target"]
    class_dim = 1 if logits.dim() > 1 else 0
    can_stay_split = (
        _is_split(logits)
        and cast(DTensor, logits).placements == (Shard(class_dim),)
        and not target.is_floating_point()
        and all(
            value == _CROSS_ENTROPY.parameters[name].default
            for name, value in given.arguments.items()
            if name not in _ON_PARTS
        )
    )
    if not can_stay_split:
        return F.cross_entropy(*gathered(args), **gathered(kwargs))
    if given.arguments["weight"] is not None:
        ignore_index, reduction = given.arguments["ignore_index"], given.arguments["reduction"]
        return _weighted(logits, target, given.arguments["weight"], ignore_index=ignore_index, reduction=reduction)
    return cast(DTensor, F.cross_entropy(*args, **kwargs)).full_tensor()


def _weighted(logits: Tensor, target: Tensor, weight: Tensor, *, ignore_index: int, reduction: str) -> Tensor:
    """On the parts, with a weight a class; torch's own (2.13) fails where a target is to be ignored."""
    losses = F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none")
    is_counted = target != ignore_index
    weights = weight[target.where(is_counted, 0)] * is_counted
    weighted = cast(DTensor, losses).full_tensor() * weights
    if reduction == "none":
        return weighted
    return weighted.sum() / weights.sum() if reduction == "mean" else weighted.sum()


def _view(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view of the parts where there is one, else of the gathered logits."""
    try:
        return _settled(func(*args, **kwargs))
    except RuntimeError:  # found on all ranks alike, before anything is sent: parts of the classes' dim are no view
        return func(*gathered(args), **gathered(kwargs))


def _pieces(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """See Note: lists of pieces; along the classes' dim, of the gathered logits."""
    logits = args[0]
    names = ("self", *(("dim",) if func.__name__ == "unbind" else ("size", "dim")))
    dim = {**dict(zip(names, args, strict=False)), **kwargs}.get("dim", 0) % logits.dim()
    if cast(DTensor, logits).placements == (Shard(dim),):
        return func(*gathered(args), **gathered(kwargs))
    shapes = [piece.shape for piece in func(torch.empty(logits.shape, device="meta"), *args[1:], **kwargs)]
    if func.__name__ == "unbind":
        return tuple(_settled(logits.select(dim, index)) for index in range(len(shapes)))
    starts = itertools.accumulate((shape[dim] for shape in shapes), initial=0)
    return tuple(_settled(logits.narrow(dim, start, shape[dim])) for start, shape in zip(starts, shapes, strict=False))


def _only_views(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if name == "to":
        return all(isinstance(value, torch.dtype | bool) for value in (*args[1:], *kwargs.values()))
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(item is None or item is Ellipsis or isinstance(item, int | slice) for item in index)
    return True


def _changes_its_first(name: str) -> bool:
    """``add_`` and its like, ``__setitem__``, and ``__iadd__``, whose result Python binds to the name again."""
    is_augmented = name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or is_augmented


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
