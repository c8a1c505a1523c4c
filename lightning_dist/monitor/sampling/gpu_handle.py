"""Which of NVML's devices is the one that torch trains on.

Note: numbers do not tell.
    NVML counts all GPUs in order of the PCI bus; CUDA counts those of ``CUDA_VISIBLE_DEVICES``, by default in order of
    speed; MIG instances have no number in NVML at all. So a device is found by its UUID: as ``CUDA_VISIBLE_DEVICES``
    names it, which may be the start of one, or as torch gives it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lightning_dist.errors import UnmeasurableError

_PREFIXES = ("GPU-", "MIG-")


class Found(NamedTuple):
    """A device.

    Attributes:
        handle: NVML's, of the GPU or the MIG instance.
        gpu: Of the GPU that it is, or is a part of.
        uuid: Its own.
        is_mig: Whether it is a MIG instance.
    """

    handle: Any
    gpu: Any
    uuid: str
    is_mig: bool


def find_device(nvml: Any, index: int, *, visible: str | None, uuid: str | None) -> Found:
    """The device.

    Args:
        nvml: The module ``pynvml``, begun.
        index: Its number in this process, as in ``cuda:1``.
        visible: ``CUDA_VISIBLE_DEVICES``; ``None``: not set.
        uuid: As torch gives it, without ``GPU-``; ``None``: unknown.

    Raises:
        UnmeasurableError: NVML does not know it.
    """
    wanted = names_of(index, visible=visible, uuid=uuid)
    known = list(_devices(nvml))
    for name in wanted:
        matching = [device for device in known if device.uuid.lower().startswith(name.lower())]
        if len(matching) == 1:
            return _with_instance(matching[0], known)
    raise UnmeasurableError(
        f"NVML knows no device {' or '.join(wanted) or f'cuda:{index}'}; it knows "
        f"{', '.join(device.uuid for device in known) or 'none'}"
    )


def names_of(index: int, *, visible: str | None, uuid: str | None) -> Sequence[str]:
    """UUIDs, or starts of them, under which NVML may know a device, the surest first; pure. See :func:`find_device`."""
    entries = [] if visible is None else [entry.strip() for entry in visible.split(",")]
    entry = entries[index] if index < len(entries) else ""
    names = [entry] if entry.startswith(_PREFIXES) else []
    if uuid:
        bare = uuid.removeprefix(_PREFIXES[0]).removeprefix(_PREFIXES[1])
        names += [prefix + bare for prefix in _PREFIXES]
    return names


def _devices(nvml: Any) -> Iterator[Found]:
    """All GPUs, each followed by its MIG instances."""
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(gpu)
        except nvml.NVMLError:  # another container's, or fallen off the bus
            continue
        yield Found(gpu, gpu, uuid, False)
        for instance in _instances(nvml, gpu):
            yield Found(instance, gpu, nvml.nvmlDeviceGetUUID(instance), True)


def _instances(nvml: Any, gpu: Any) -> Iterator[Any]:
    try:
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)
    except nvml.NVMLError:  # it cannot be divided
        return
    for index in range(most):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
        except nvml.NVMLError:  # no instance has this number
            continue


def _with_instance(device: Found, known: Sequence[Found]) -> Found:
    """A process that is given a divided GPU by its number gets the first of its instances."""
    if device.is_mig:
        return device
    own = known[known.index(device) + 1 :]
    return own[0] if own and own[0].is_mig else device
