"""A loader that ends on all ranks at once, however many batches each rank has.

A rank that runs out of batches while others go on leaves them waiting in the gradient all-reduce. Where every rank
knows its number of batches, the loaders are cut to the smallest one beforehand. Where one does not, everybody is asked
before each batch whether they have one; the ranks then stop together or raise together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from lightning_dist.errors import UnevenInputsError

Exchange = Callable[[int], list[int]]
"""Say a number, get everybody's by rank; a collective call."""

_UNKNOWN = -1
_NOTHING = object()


def agreed_loader(loader: Any, *, exchange: Exchange, on_uneven: str) -> Any:
    """The loader itself if all ranks surely have equally many batches, else one that ends on all ranks at once.

    Every rank calls it.

    Args:
        loader: This rank's loader; sized or not.
        exchange: How ranks hear each other. It may be called once a batch, so no other thread may use it.
        on_uneven: ``stop`` or ``error``.

    Raises:
        UnevenInputsError: The lengths are known and differ, and ``on_uneven`` is ``error``.
    """
    stated = _stated_length(loader)
    lengths = exchange(_UNKNOWN if _may_be_wrong(loader) else stated)
    if _UNKNOWN in lengths:
        all_stated = exchange(stated)
        length = None if _UNKNOWN in all_stated else min(all_stated)
        return _with_optional_methods(AskingLoader(loader, exchange=exchange, on_uneven=on_uneven), length)
    if len(set(lengths)) == 1:
        return loader
    if on_uneven == "error":
        raise UnevenInputsError(_explain(lengths, exact=True))
    return _with_optional_methods(CutLoader(loader, length=min(lengths)), min(lengths))


class _LoaderView:
    """A loader, seen through; whatever is asked of it is the loader's own."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    @property
    def _iterator(self) -> Any:
        """The loader's own iterator: Lightning resets it after it has ended the loader's workers."""
        return self.loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self.loader._iterator = iterator

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not yet set: while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)


class AskingLoader(_LoaderView):
    """Asks everybody before each batch; yields while all have one.

    Args:
        loader: This rank's loader.
        exchange: How ranks hear each other.
        on_uneven: ``stop`` (end with the shortest) or ``error``.
    """

    def __init__(self, loader: Any, *, exchange: Exchange, on_uneven: str) -> None:
        super().__init__(loader)
        self._exchange = exchange
        self._on_uneven = on_uneven

    def __iter__(self) -> Iterator[Any]:
        return self._batches(iter(self.loader))  # at once: the loader may look at what was taken of it before

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        count = 0
        while True:
            batch = next(iterator, _NOTHING)
            have = self._exchange(int(batch is not _NOTHING))
            if not all(have):
                if any(have) and self._on_uneven == "error":
                    raise UnevenInputsError(_explain([count + given for given in have], exact=False))
                return
            count += 1
            yield batch


class CutLoader(_LoaderView):
    """Ends after a number of batches that every rank has.

    Args:
        loader: This rank's loader.
        length: Number of batches.
    """

    def __init__(self, loader: Any, *, length: int) -> None:
        super().__init__(loader)
        self._length = length

    def __iter__(self) -> Iterator[Any]:
        return self._batches(iter(self.loader))  # at once, as above

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for index in range(self._length):  # zip would take one more batch than it yields
            batch = next(iterator, _NOTHING)
            if batch is _NOTHING:
                raise UnevenInputsError(
                    f"a training loader ended after {index} batches although its length is {len(self.loader)}; "
                    "let __len__ tell the truth, or leave it out: the ranks then agree before each batch"
                )
            yield batch


def _stated_length(loader: Any) -> int:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return _UNKNOWN


def _may_be_wrong(loader: Any) -> bool:
    """The length of an iterable dataset is an estimate: of all ranks' samples together, or before filtering."""
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def _with_optional_methods(view: _LoaderView, length: int | None) -> _LoaderView:
    """Lightning goes by which methods the type has, so each exists only where it has a meaning."""
    methods: dict[str, Any] = {}
    if length is not None:
        methods["__len__"] = lambda self: length
    if hasattr(view.loader, "state_dict") and hasattr(view.loader, "load_state_dict"):
        methods["state_dict"] = lambda self: self.loader.state_dict()
        methods["load_state_dict"] = lambda self, state: self.loader.load_state_dict(state)
    view.__class__ = type(type(view).__name__, (type(view),), methods)
    return view


def _explain(counts: list[int], *, exact: bool) -> str:
    kind = "batches" if exact else "batches, at least,"
    listed = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
    return (
        f"ranks have different numbers of training {kind} ({listed}); give each rank equally many, or set "
        "parallel.uneven_inputs=stop to end all of them with the shortest"
    )
