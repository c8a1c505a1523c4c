"""What NVML says of the right device, under any CUDA_VISIBLE_DEVICES and of MIG instances; and why it says nothing."""

from __future__ import annotations

import sys

import pytest
import torch

from lightning_dist.errors import UnmeasurableError
from lightning_dist.monitor.sampling.gpu import METRICS, GpuSource, thinned
from lightning_dist.monitor.sampling.gpu_handle import find_device, names_of
from tests.support.nvml import FakeNvml, Gpu, Instance, now_us

CUDA = torch.device("cuda", 0)
MIG = Instance("MIG-aaaa-1", used=11), Instance("MIG-bbbb-2", used=22)


def machine() -> FakeNvml:
    """As NVML numbers them, by the bus: not as CUDA does."""
    return FakeNvml(
        [
            Gpu("GPU-1111-slow", used=1),
            Gpu("GPU-2222-fast", utilisation=80, used=2, power_mw=250_000, celsius=61),
            Gpu("GPU-3333-split", used=3, power_mw=90_000, celsius=40, instances=[MIG[0], None, MIG[1]]),
        ]
    )


@pytest.mark.parametrize(
    ("index", "visible", "uuid", "expected"),
    [
        (0, None, "2222-fast", "GPU-2222-fast"),  # CUDA's order is by speed, so its first is not NVML's
        (1, "2,0", "1111-slow", "GPU-1111-slow"),
        (0, "GPU-2222-fast", None, "GPU-2222-fast"),
        (1, "GPU-1111, GPU-2222", None, "GPU-2222-fast"),  # the start of a UUID is enough
        (0, "gpu-2222-fast", "2222-fast", "GPU-2222-fast"),
        (0, "MIG-bbbb-2", "3333-split", "MIG-bbbb-2"),  # torch may give the GPU's
        (0, "MIG-bbbb-2", "bbbb-2", "MIG-bbbb-2"),  # or the instance's
        (0, "2", "bbbb-2", "MIG-bbbb-2"),
        (0, "2", "3333-split", "MIG-aaaa-1"),  # a divided GPU by its number: its first instance
        (0, "GPU-3333-split", None, "MIG-aaaa-1"),
    ],
)
def test_the_device_is_the_one_that_torch_trains_on(
    index: int, visible: str | None, uuid: str | None, expected: str
) -> None:
    nvml = machine()
    nvml.nvmlInit()
    found = find_device(nvml, index, visible=visible, uuid=uuid)
    assert found.uuid == expected
    assert found.is_mig == expected.startswith("MIG-")
    assert found.gpu.uuid == ("GPU-3333-split" if found.is_mig else expected)


def test_names_that_fit_several_devices_are_none() -> None:
    nvml = FakeNvml([Gpu("GPU-1111-a"), Gpu("GPU-1111-b")])
    nvml.nvmlInit()
    with pytest.raises(UnmeasurableError, match="knows no device GPU-1111; it knows GPU-1111-a, GPU-1111-b"):
        find_device(nvml, 0, visible="GPU-1111", uuid=None)


def test_a_device_that_has_fallen_off_the_bus_does_not_hide_the_others() -> None:
    nvml = FakeNvml([Gpu("GPU-1", is_lost=True), Gpu("GPU-2")])
    nvml.nvmlInit()
    assert find_device(nvml, 0, visible=None, uuid="2").uuid == "GPU-2"


def test_numbers_are_not_taken_for_names() -> None:
    assert names_of(1, visible="0,1", uuid=None) == []
    assert names_of(5, visible="GPU-1", uuid="7") == ["GPU-7", "MIG-7"]
    assert names_of(0, visible="", uuid="GPU-7") == ["GPU-7", "MIG-7"]


def test_all_metrics_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    nvml = machine()
    gpu = nvml.gpus[1]
    gpu.samples = [(now_us() - 5_000_000, 99)]  # from before training
    source = GpuSource(CUDA, nvml=nvml, uuid="2222-fast")
    assert source.metrics == METRICS
    assert source.unavailable == {}
    start_us = now_us()
    gpu.samples += [(start_us, 100), (start_us + 1000, 0)]
    readings = source.read(0)
    assert [(r.value, r.wall_ns) for r in readings if r.metric == "gpu_utilisation"] == [
        (1.0, start_us * 1000),
        (0.0, (start_us + 1000) * 1000),
    ]
    others = {r.metric: r.value for r in readings if r.metric != "gpu_utilisation"}
    assert others == {"gpu_memory": 2, "gpu_power": 250.0, "gpu_temperature": 61}
    assert "gpu_utilisation" not in {r.metric for r in source.read(0)}  # nothing new
    source.close()
    source.close()
    assert nvml.begun == 0


def test_a_gpu_without_a_history_says_how_busy_it_is_now() -> None:
    nvml = machine()
    nvml.gpus[1].lacks = {"nvmlDeviceGetSamples", "nvmlDeviceGetPowerUsage"}
    source = GpuSource(CUDA, nvml=nvml, uuid="2222-fast")
    assert {r.metric: r.value for r in source.read(0)} == {
        "gpu_utilisation": 0.8,
        "gpu_memory": 2,
        "gpu_temperature": 61,
    }
    assert source.unavailable == {"gpu_power": "NVML gives none for this device: Not Supported"}
    source.close()


def test_a_mig_instance_has_its_own_memory_and_its_gpus_power(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-bbbb-2")
    source = GpuSource(CUDA, nvml=machine(), uuid="3333-split")
    assert {r.metric: r.value for r in source.read(0)} == {
        "gpu_memory": 22,
        "gpu_power": 90.0,
        "gpu_temperature": 40,
    }
    assert source.unavailable == {"gpu_utilisation": "NVML gives none for MIG instances: Not Supported"}
    source.close()


def test_a_clock_that_counts_from_another_moment_is_not_believed() -> None:
    nvml = machine()
    nvml.gpus[1].samples = [(1_000_000, 5)]  # since boot
    source = GpuSource(CUDA, nvml=nvml, uuid="2222-fast")
    nvml.gpus[1].samples += [(2_000_000, 50)]
    (busy,) = (r for r in source.read(0) if r.metric == "gpu_utilisation")
    assert busy == ("gpu_utilisation", 0.5, None, None)
    source.close()


def test_many_samples_are_thinned_by_means() -> None:
    samples = [(n, float(n % 2)) for n in range(100)]
    assert thinned(samples, 4) == [(24, 12 / 25), (49, 13 / 25), (74, 12 / 25), (99, 13 / 25)]
    assert thinned(samples[:3], 8) == samples[:3]
    assert thinned([], 8) == []


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnmeasurableError, match="training is on cpu, which is no GPU"):
        GpuSource(torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UnmeasurableError, match="pip install nvidia-ml-py"):
        GpuSource(CUDA, uuid="1")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([], has_library=False))
    with pytest.raises(UnmeasurableError, match="NVML cannot be used: NVML Shared Library Not Found"):
        GpuSource(CUDA, uuid="1")


def test_nvml_is_ended_where_the_device_is_unknown() -> None:
    nvml = machine()
    with pytest.raises(UnmeasurableError, match="knows no device GPU-9 or MIG-9"):
        GpuSource(CUDA, nvml=nvml, uuid="9")
    assert nvml.begun == 0


def test_the_fake_has_the_functions_of_the_real_module() -> None:
    real = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    missing = [name for name in dir(FakeNvml) if name.startswith(("nvml", "NVML")) and not hasattr(real, name)]
    assert missing == []
