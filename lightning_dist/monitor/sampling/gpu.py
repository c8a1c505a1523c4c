"""What NVML says of the GPU that a rank trains on: how busy it is, its memory, its power, its temperature."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_dist.errors import UnmeasurableError
from lightning_dist.monitor.sampling.gpu_handle import Found, find_device
from lightning_dist.monitor.sampling.source import Reading

METRICS = ("gpu_utilisation", "gpu_memory", "gpu_power", "gpu_temperature")

_MOST_READINGS = 8  # of utilisation, at a time; NVML may have a hundred a second
_CLOCKS_DIFFER_NS = 3600 * 10**9  # more than any reading is old: NVML counts from another moment


class GpuSource:
    """The GPU that a rank trains on; of a MIG instance its memory, and of its GPU power and temperature.

    Args:
        device: What torch trains on.
        nvml: The module ``pynvml``; imported if not given.
        uuid: The device's, as torch gives it; asked for if not given.

    Raises:
        UnmeasurableError: NVML is not there, does not know the device, or gives none of the values.
    """

    is_fine = False

    def __init__(self, device: torch.device, *, nvml: Any = None, uuid: str | None = None) -> None:
        if device.type != "cuda":
            raise UnmeasurableError(f"training is on {device.type}, which is no GPU")
        self._nvml = _begun(nvml)
        try:
            index = device.index or 0
            known_as = _uuid_of(index) if uuid is None else uuid
            found = find_device(self._nvml, index, visible=os.environ.get("CUDA_VISIBLE_DEVICES"), uuid=known_as)
            self.uuid = found.uuid
            self._readers, self.unavailable = _usable(_readers(self._nvml, found), self._nvml, found)
            if not self._readers:
                raise UnmeasurableError("; ".join(sorted(set(self.unavailable.values()))))
        except BaseException:
            self.close()
            raise
        self.metrics = tuple(self._readers)

    def read(self, now_ns: int) -> list[Reading]:
        """As it is now, and how busy it was since the last time."""
        found: list[Reading] = []
        for read in self._readers.values():
            found += read()
        return found

    def close(self) -> None:
        """End NVML, which counts how often it was begun."""
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()


_Reader = Callable[[], Sequence[Reading]]


class _Utilisation:
    """NVML keeps a short history: what it added since the last time, thinned by means."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._last_us = 0

    def __call__(self) -> Sequence[Reading]:
        nvml = self._nvml
        try:
            _, samples = nvml.nvmlDeviceGetSamples(self._handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, self._last_us)
        except nvml.NVMLError_NotFound:  # nothing since then
            return []
        fresh = [(each.timeStamp, each.sampleValue.uiVal) for each in samples if each.timeStamp > self._last_us]
        is_first, self._last_us = self._last_us == 0, max((at_us for at_us, _ in fresh), default=self._last_us)
        if is_first:  # its history from before
            return []
        return [Reading("gpu_utilisation", percent / 100, _wall_ns(at_us)) for at_us, percent in thinned(fresh)]


def thinned(samples: Sequence[tuple[int, float]], most: int = _MOST_READINGS) -> list[tuple[int, float]]:
    """At most so many samples, each the mean of neighbours with the time of the last; pure."""
    count = min(most, len(samples))
    cuts = [len(samples) * number // count for number in range(count + 1)] if count else []
    groups = [samples[start:end] for start, end in itertools.pairwise(cuts)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _wall_ns(at_us: int) -> int | None:
    return at_us * 1000 if abs(time.time_ns() - at_us * 1000) < _CLOCKS_DIFFER_NS else None


def _begun(nvml: Any) -> Any:
    try:
        nvml = importlib.import_module("pynvml") if nvml is None else nvml
    except ImportError as error:
        raise UnmeasurableError("the package nvidia-ml-py is not installed: pip install nvidia-ml-py") from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise UnmeasurableError(f"NVML cannot be used: {error}") from error
    return nvml


def _uuid_of(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _readers(nvml: Any, found: Found) -> Mapping[str, Sequence[_Reader]]:
    """How to read each metric; the first way that works is taken."""

    def one(metric: str, read: Callable[[], float]) -> _Reader:
        return lambda: [Reading(metric, read())]

    busy, memory, power, temperature = METRICS
    return {
        busy: [
            _Utilisation(nvml, found.handle),
            one(busy, lambda: nvml.nvmlDeviceGetUtilizationRates(found.handle).gpu / 100),
        ],
        memory: [one(memory, lambda: nvml.nvmlDeviceGetMemoryInfo(found.handle).used)],
        power: [one(power, lambda: nvml.nvmlDeviceGetPowerUsage(found.gpu) / 1000)],
        temperature: [
            one(temperature, lambda: nvml.nvmlDeviceGetTemperature(found.gpu, nvml.NVML_TEMPERATURE_GPU)),
        ],
    }


def _usable(
    readers: Mapping[str, Sequence[_Reader]], nvml: Any, found: Found
) -> tuple[dict[str, _Reader], dict[str, str]]:
    """Those that this device has, and why not the others."""
    usable: dict[str, _Reader] = {}
    unavailable: dict[str, str] = {}
    for metric, ways in readers.items():
        for read in ways:
            try:
                read()
            except nvml.NVMLError as error:
                what = "MIG instances" if found.is_mig and metric == METRICS[0] else "this device"
                unavailable[metric] = f"NVML gives none for {what}: {error}"
            else:
                usable[metric] = read
                unavailable.pop(metric, None)
                break
    return usable, unavailable
