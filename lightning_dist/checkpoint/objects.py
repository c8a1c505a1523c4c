"""Small state that is no tensor, as bytes and back: loops, callbacks, schedulers, random generators.

Written by ``torch.save``, read with ``weights_only=True``: nothing is imported or called but what :func:`allowed`
lists. What is not on the list is refused when it is saved already, so that no checkpoint turns out unreadable later.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import io
import itertools
import pathlib
import pickle
import pickletools
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from lightning_dist.errors import CheckpointError, UntrustedObjectError

Global = Callable[..., Any] | tuple[Callable[..., Any], str]

_LOCK = threading.Lock()  # torch keeps its list of safe names for the process, and adds and removes are not atomic
# What torch says of a name that is not on its list.
_REFUSED = re.compile(r"GLOBAL ([\w.]+) (?:was not an allowed|whose module)")

# What torch.save writes of a name (protocol 2), and bytes that look alike.
_MAY_REFER = re.compile(rb"c(?=([!-~]+)\n([!-~]+)\n)")


@dataclass(frozen=True)
class Encoded:
    """An object that is bytes already; see :func:`encode`."""

    data: bytes


def encode(
    value: object,
    name: str,
    *,
    allow: Iterable[Global] = (),
    reads_back: bool = True,
    known: set[tuple[bytes, bytes]] | None = None,
) -> Encoded:
    """An object as bytes.

    Args:
        value: Plain values, containers, tensors, and what :func:`allowed` lists.
        name: Of the object, for messages.
        allow: More that may be in it; reading it back takes the same.
        reads_back: Try whether it can be read; what it refers to is looked at in any case.
        known: What other objects were found to refer to, with the same ``allow``: not looked at again. What is found
            now is added.

    Raises:
        CheckpointError: It holds something that could not be read back without running its code.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:
        raise CheckpointError(f"object {name!r} cannot be saved: {type(error).__name__}: {error}") from error
    encoded = Encoded(buffer.getvalue())
    allow = list(allow)
    referred = frozenset(_MAY_REFER.findall(encoded.data))
    unsafe = [] if known is not None and referred <= known else _unsafe_names(encoded.data, allow)
    if known is not None and not unsafe:
        known |= referred
    if unsafe:
        raise CheckpointError(
            f"object {name!r} holds {', '.join(unsafe)}, which cannot be read back without running code. Save plain "
            "values instead (a state_dict, settings), or pass the classes as allow= to both saving and loading"
        )
    if not reads_back:
        return encoded
    try:
        decode(encoded.data, name, allow=allow)
    except CheckpointError as error:
        raise CheckpointError(f"object {name!r} cannot be saved, as it could not be read back: {error}") from error
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
        with _LOCK, torch.serialization.safe_globals([*allowed(), *allow]), _quiet(data):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        refused = _REFUSED.findall(str(error)) or _globals_of(data)
        if not refused:
            raise CheckpointError(f"object {name!r} cannot be read: {_reason(error)}") from error
        raise UntrustedObjectError(
            f"object {name!r} would load {', '.join(refused)} and is refused: it was not written by this library, or "
            "with allow= that is missing here"
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
    return [*paths, *times, collections.defaultdict, set, frozenset, slice, complex, bytearray]


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


@contextlib.contextmanager
def _quiet(data: bytes | bytearray | memoryview) -> Iterator[None]:
    """No warnings about the age of a bare pickle, which will be refused. For what we write ourselves warnings are left
    alone: their filters are not a thread's own.
    """
    if bytes(data[:2]) == b"PK":
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _globals_of(data: bytes | bytearray | memoryview) -> list[str]:
    """What a bare pickle, which this library does not write, would import; nothing is run to find out."""
    names, texts = [], [""]
    try:
        for opcode, argument, _ in pickletools.genops(bytes(data)):
            if opcode.name == "GLOBAL":
                names.append(str(argument).replace(" ", "."))
            elif opcode.name == "STACK_GLOBAL":
                names.append(".".join(texts[-2:]))
            elif isinstance(argument, str):
                texts.append(argument)
    except Exception:  # it ends or goes wrong somewhere: what came before is enough
        return names
    return names


def _reason(error: Exception) -> str:
    """What torch says, without its advice to load it unsafely."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((b for a, b in itertools.pairwise(lines) if "WeightsUnpickler error" in a), lines[0])


def _unsafe_names(data: bytes, allow: Iterable[Global]) -> list[str]:
    with _LOCK, torch.serialization.safe_globals([*allowed(), *allow]):
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)))
