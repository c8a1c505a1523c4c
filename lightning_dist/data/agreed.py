"""A loader that ends on all ranks at once, however many batches each rank has.

A rank that runs out of batches while others go on leaves them waiting in the gradient all-reduce. This loader asks everybody
before each batch whether they have one; the ranks then stop together or raise together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning_dist.errors import UnevenInputsError

Exchange = Callable[[int], list[int]]
"""Say a number, get everybody's by rank; a collective call."""

_UNSIZED = -1


class AgreedLoader:
    """Wraps a loader so that every rank yields the same number of batches.

    Args:
        loader: This rank's loader.
        exchange: How ranks hear each other. It is called once a batch, so it must not be shared with another thread.
        on_uneven: ``stop`` (end with the shortest) or ``error``.
    """

    def __init__(self, loader: Any, *, exchange: Exchange, on_uneven: str) -> None:
        self.loader = loader
        self._exchange = exchange
        self._on_uneven = on_uneven

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.loader)
        nothing = object()
        count = 0
        while True:
            batch = next(iterator, nothing)
            have = self._exchange(int(batch is not nothing))
            if not all(have):
                if any(have) and self._on_uneven == "error":
                    raise UnevenInputsError(_explain([count + int(h) for h in have], exact=False))
                return
            count += 1
            yield batch

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not yet set: while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)


class SizedAgreedLoader(AgreedLoader):
    """The same where every rank knows its number of batches beforehand: nothing needs to be asked, only cut short."""

    def __init__(self, loader: Any, *, length: int) -> None:
        super().__init__(loader, exchange=lambda number: [number], on_uneven="stop")
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        # zip would take one more batch than it yields
        iterator = iter(self.loader)
        for _ in range(self._length):
            yield next(iterator)


def agreed_loader(loader: Any, *, exchange: Exchange, on_uneven: str) -> Any:
    """The loader itself if all ranks have equally many batches, else one that ends on all ranks at once; collective.

    Args:
        loader: This rank's loader; sized or not.
        exchange: How ranks hear each other.
        on_uneven: ``stop`` or ``error``.

    Raises:
        UnevenInputsError: The lengths are known and differ, and ``on_uneven`` is ``error``.
    """
    lengths = exchange(_length_of(loader))
    if _UNSIZED in lengths:
        wrapped: AgreedLoader = AgreedLoader(loader, exchange=exchange, on_uneven=on_uneven)
    elif len(set(lengths)) == 1:
        return loader
    elif on_uneven == "error":
        raise UnevenInputsError(_explain(lengths, exact=True))
    else:
        wrapped = SizedAgreedLoader(loader, length=min(lengths))
    return _with_state(wrapped)


def _length_of(loader: Any) -> int:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return _UNSIZED


def _with_state(wrapped: AgreedLoader) -> AgreedLoader:
    """Lightning saves the state of whatever has the two methods on its type, so they exist only where the loader has them."""
    if not (hasattr(wrapped.loader, "state_dict") and hasattr(wrapped.loader, "load_state_dict")):
        return wrapped
    base = type(wrapped)
    wrapped.__class__ = type(
        f"Stateful{base.__name__}",
        (base,),
        {
            "state_dict": lambda self: self.loader.state_dict(),
            "load_state_dict": lambda self, state: self.loader.load_state_dict(state),
        },
    )
    return wrapped


def _explain(counts: list[int], *, exact: bool) -> str:
    kind = "batches" if exact else "batches, at least,"
    listed = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
    return (
        f"ranks have different numbers of training {kind} ({listed}); give each rank equally many, or set "
        "parallel.uneven_inputs=stop to end all of them with the shortest"
    )
