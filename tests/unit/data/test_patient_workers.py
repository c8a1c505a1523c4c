"""Workers of loaders that a scheduler's signal does not end at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_dist.data.loading.patient_workers import Patient, make_patient

ENDS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Signalled(IterableDataset[int]):
    """Its worker is sent signals between two samples."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        yield int(os.environ.get("BEGUN", "-1"))
        for number in self.numbers:
            os.kill(os.getpid(), number)
        yield 2


def note(worker: int) -> None:
    os.environ["BEGUN"] = str(worker)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_worker_goes_on_after_a_signal_and_begins_as_the_user_wants(context: str) -> None:
    loader = DataLoader(
        Signalled(ENDS), batch_size=None, num_workers=1, multiprocessing_context=context, worker_init_fn=note
    )
    make_patient(loader)
    make_patient(loader)  # once
    assert list(loader) == [0, 2]


def test_it_ends_at_a_second_one() -> None:
    program = (
        "import os, signal; from lightning_dist.data.loading.patient_workers import Patient; Patient(None)(0); "
        "os.kill(os.getpid(), 15); print('goes on', flush=True); os.kill(os.getpid(), 15); print('too far')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "goes on\n")


def test_a_loader_without_workers_stays_as_it_is() -> None:
    loader = DataLoader(torch.zeros(2))
    make_patient(loader)
    assert not isinstance(loader.worker_init_fn, Patient)
