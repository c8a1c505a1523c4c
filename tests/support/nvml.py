"""A module like ``pynvml``: the functions that the monitor calls, over GPUs and MIG instances as values.

Errors are raised as the real module does: of a class for each code, which are its subclasses.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """Any error."""


class NVMLError_NotSupported(NVMLError):  # noqa: N801  # the real module's name
    """This device has no such value."""

    def __str__(self) -> str:
        return "Not Supported"


class NVMLError_NotFound(NVMLError):  # noqa: N801  # the real module's name
    """There is no such device, or no sample."""

    def __str__(self) -> str:
        return "Not Found"


class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801  # the real module's name
    """No driver."""

    def __str__(self) -> str:
        return "NVML Shared Library Not Found"


@dataclass
class Instance:
    """A MIG instance."""

    uuid: str
    used: int = 0


@dataclass
class Gpu:
    """A GPU.

    Attributes:
        uuid: With its prefix.
        utilisation: In percent, at present.
        samples: Its history: (microseconds, percent).
        lacks: Names of functions that it does not support.
        instances: What it is divided into, by number; ``None``: none has the number.
        is_lost: It has fallen off the bus.
    """

    uuid: str
    utilisation: int = 0
    used: int = 0
    power_mw: int = 0
    celsius: int = 0
    samples: list[tuple[int, int]] = field(default_factory=list)
    lacks: set[str] = field(default_factory=set)
    instances: Sequence[Instance | None] = ()
    is_lost: bool = False


class FakeNvml:
    """The module. A handle is a :class:`Gpu` or an :class:`Instance`.

    Args:
        gpus: In order of the bus.
        has_library: Whether there is a driver.
    """

    NVML_TEMPERATURE_GPU = 0
    NVML_GPU_UTILIZATION_SAMPLES = 1
    NVMLError = NVMLError
    NVMLError_NotFound = NVMLError_NotFound

    def __init__(self, gpus: Sequence[Gpu], *, has_library: bool = True) -> None:
        self.gpus = gpus
        self.has_library = has_library
        self.begun = 0

    def nvmlInit(self) -> None:  # noqa: N802  # the real module's names, here and below
        if not self.has_library:
            raise NVMLError_LibraryNotFound
        self.begun += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.begun -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._check(None, "")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:  # noqa: N802
        if self.gpus[index].is_lost:
            raise NVMLError
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, device: Gpu | Instance) -> str:  # noqa: N802
        return device.uuid

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Gpu) -> int:  # noqa: N802
        if not gpu.instances:
            raise NVMLError_NotSupported
        return len(gpu.instances)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, index: int) -> Instance:  # noqa: N802
        instance = gpu.instances[index]
        if instance is None:
            raise NVMLError_NotFound
        return instance

    def nvmlDeviceGetSamples(self, device: Any, kind: int, since_us: int) -> tuple[int, list[Any]]:  # noqa: N802
        self._check(device, "nvmlDeviceGetSamples")
        assert kind == self.NVML_GPU_UTILIZATION_SAMPLES
        fresh = [sample for sample in device.samples if sample[0] > since_us]
        if not fresh:
            raise NVMLError_NotFound
        return 1, [SimpleNamespace(timeStamp=at, sampleValue=SimpleNamespace(uiVal=value)) for at, value in fresh]

    def nvmlDeviceGetUtilizationRates(self, device: Any) -> Any:  # noqa: N802
        self._check(device, "nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=device.utilisation, memory=0)

    def nvmlDeviceGetMemoryInfo(self, device: Any) -> Any:  # noqa: N802
        if isinstance(device, Gpu):
            self._check(device, "nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(used=device.used, total=1 << 40, free=0)

    def nvmlDeviceGetPowerUsage(self, device: Any) -> int:  # noqa: N802
        self._check(device, "nvmlDeviceGetPowerUsage")
        return int(device.power_mw)

    def nvmlDeviceGetTemperature(self, device: Any, sensor: int) -> int:  # noqa: N802
        self._check(device, "nvmlDeviceGetTemperature")
        assert sensor == self.NVML_TEMPERATURE_GPU
        return int(device.celsius)

    def _check(self, device: Any, name: str) -> None:
        if not self.begun:
            raise NVMLError("Uninitialized")
        if isinstance(device, Instance) or (isinstance(device, Gpu) and name in device.lacks):
            raise NVMLError_NotSupported


def now_us() -> int:
    """As the driver stamps its samples."""
    return time.time_ns() // 1000
