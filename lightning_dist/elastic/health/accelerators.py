"""Whether this host's GPUs compute right, and have no memory errors; nothing on hosts without."""

from __future__ import annotations

import time
from pathlib import Path

from lightning_dist.elastic.health.findings import Outcome
from lightning_dist.elastic.health.request import Request

_DRIVER = Path("/proc/driver/nvidia/version")
_SIZE = 512
_LARGEST = 8  # 512 * 7 * 7 is exact in fp32 and in TF32's sums


def check_accelerators(request: Request) -> Outcome:
    """A known product on each GPU; errors of its memory that could not be corrected."""
    del request
    if not _DRIVER.exists():
        return Outcome(notes=("accelerators: none here",))
    try:
        import torch  # seconds of import, which hosts without a GPU do not pay
    except ImportError as error:
        return Outcome(notes=(f"accelerators: torch cannot be imported: {error}",))
    if not torch.cuda.is_available():
        return Outcome(notes=("accelerators: torch sees none",))
    findings: list[str] = []
    rates: list[float] = []
    left = torch.arange(_SIZE * _SIZE).reshape(_SIZE, _SIZE) % _LARGEST
    right = left.T.contiguous() * 3 % _LARGEST
    expected = (left @ right).float()
    for index in range(torch.cuda.device_count()):
        try:
            a, b = left.float().cuda(index), right.float().cuda(index)
            product = a @ b
            torch.cuda.synchronize(index)
            begin_s = time.monotonic()
            for _ in range(10):
                product = a @ b
            torch.cuda.synchronize(index)
            rates.append(10 * 2 * _SIZE**3 / max(time.monotonic() - begin_s, 1e-6))
            wrong = int((product.cpu() != expected).sum())
        except RuntimeError as error:
            findings.append(f"GPU {index} does not compute: {str(error).splitlines()[0]}")
            continue
        if wrong:
            findings.append(f"GPU {index} computed {wrong} of {expected.numel()} values of a known product wrong")
    errors, notes = _memory_errors()
    return Outcome((*findings, *errors), {"accelerator_flops": min(rates)} if rates else {}, notes)


def _memory_errors() -> tuple[list[str], tuple[str, ...]]:
    """What NVML says of errors since the driver was loaded."""
    try:
        import pynvml  # type: ignore[import-untyped]  # it has no types
    except ImportError:
        return [], ("accelerators: memory errors are not read: the package nvidia-ml-py is not installed",)
    findings = []
    notes = []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], (f"accelerators: memory errors are not read: {error}",)
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                count = pynvml.nvmlDeviceGetTotalEccErrors(
                    pynvml.nvmlDeviceGetHandleByIndex(index),
                    pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                    pynvml.NVML_VOLATILE_ECC,
                )
            except pynvml.NVMLError as error:
                notes.append(f"accelerators: memory errors of GPU {index} are not read: {error}")
                continue
            if count:
                findings.append(f"GPU {index} has had {count} memory errors that could not be corrected")
    finally:
        pynvml.nvmlShutdown()
    return findings, tuple(notes)
