"""Small state that is no tensor, as bytes and back: loops, callbacks, schedulers, random generators.

Written by ``torch.save``, read with ``weights_only=True``: nothing is imported or called but what :func:`allowed`
lists. What is not on the list is refused when it is saved already, so that no checkpoint turns out unreadable later.
"""

from __future__ import annotations

import collections
import datetime
import io
import pathlib
import pickle
import re
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from lightning_dist.errors import CheckpointError, UntrustedObjectError

Global = Callable[..., Any] | tuple[Callable[..., Any], str]

_LOCK = threading.Lock()  # torch keeps its list of safe names for the process, and adds and removes are not atomic
_REFUSED = re.compile(r"(?:GLOBAL|class|function|instantiate)\s+`?<?(?:class |function |built-in function )?'?([\w.]+)")


@dataclass(frozen=True)
class Encoded:
    """An object that is bytes already; see :func:`encode`."""

    data: bytes


def encode(value: object, name: str, *, allow: Iterable[Global] = ()) -> Encoded:
    """An object as bytes.

    Args:
        value: Plain values, containers, tensors, and what :func:`allowed` lists.
        name: Of the object, for messages.
        allow: More that may be in it; reading it back takes the same.

    Raises:
        CheckpointError: It holds something that could not be read back without running its code.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:
        raise CheckpointError(f"object {name!r} cannot be saved: {type(error).__name__}: {error}") from error
    encoded = Encoded(buffer.getvalue())
    unsafe = _unsafe_names(encoded.data, allow)
    if unsafe:
        raise CheckpointError(
            f"object {name!r} holds {', '.join(unsafe)}, which cannot be read back without running code. Save plain "
            "values instead (a state_dict, a dict of settings), or pass the classes as allow= to both saving and loading"
        )
    return encoded


def decode(data: bytes | bytearray | memoryview, name: str, *, allow: Iterable[Global] = ()) -> Any:
    """The object of some bytes; tensors are on the CPU.

    Args:
        data: What :func:`encode` made.
        name: Of the object, for messages.
        allow: As for :func:`encode`.

    Raises:
        UntrustedObjectError: It would load something that is not allowed; names it.
        CheckpointError: These are no bytes of an object.
    """
    try:
        with _LOCK, torch.serialization.safe_globals([*allowed(), *allow]):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        what = _REFUSED.search(str(error))
        raise UntrustedObjectError(
            f"object {name!r} would load {what.group(1) if what else 'what is not allowed'} and is refused: it was not "
            "written by this library, or with allow= that is missing here"
        ) from error
    except Exception as error:
        raise CheckpointError(f"object {name!r} cannot be read: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=1)
def allowed() -> tuple[Global, ...]:
    """What may be in an object besides what ``weights_only`` takes (plain values, containers, tensors, devices)."""
    return (*_standard(), *_numpy(), *_omegaconf())


def _standard() -> list[Global]:
    paths: list[Global] = []
    for kind in (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath):
        # Their module has another name in Python 3.13, and a checkpoint may be read by another Python.
        paths += [(kind, f"pathlib.{kind.__name__}"), (kind, f"pathlib._local.{kind.__name__}")]
    times = [datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone]
    return [*paths, *times, collections.deque, collections.defaultdict, set, frozenset, slice, complex, bytearray]


def _numpy() -> list[Global]:
    scalar, reconstruct = np.float64(0).__reduce__()[0], np.zeros(1).__reduce__()[0]
    dtypes = [type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDGSUmM"]
    named: list[Global] = []
    for function in (scalar, reconstruct):
        assert callable(function)
        modules = ("numpy.core.multiarray", "numpy._core.multiarray")  # of numpy 1 and 2
        named += [(function, f"{module}.{function.__name__}") for module in modules]
    return [np.ndarray, np.dtype, *dict.fromkeys(dtypes), *named]


def _omegaconf() -> list[Global]:
    try:
        import omegaconf
        from omegaconf import base, nodes
    except ImportError:
        return []
    kinds: list[Global] = [omegaconf.DictConfig, omegaconf.ListConfig, base.ContainerMetadata, base.Metadata]
    kinds += [
        getattr(nodes, name) for name in dir(nodes) if name.endswith("Node") and name not in ("Node", "ValueNode")
    ]
    return [*kinds, (Any, "typing.Any"), dict, list, int, float, str, bool]


def _unsafe_names(data: bytes, allow: Iterable[Global]) -> list[str]:
    with _LOCK, torch.serialization.safe_globals([*allowed(), *allow]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)))
