"""Where each step's time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_dist.capture import TrainerCapture, capture_of, say
from lightning_dist.capture.batches import CountTokens
from lightning_dist.capture.step_files import StepFiles
from lightning_dist.config.checks import check_local
from lightning_dist.monitor.shown_path import shown_path


class StepTimeline(pl.Callback):
    """Writes, of each step and rank, how long its phases took; under any strategy, in any Lightning project.

    Each rank writes a file of its own, from a thread: no collective, and no device is waited for. What goes wrong ends
    the recording, with a warning, and not the training.

    Args:
        folder: Where to; if not given, ``monitor`` in the logger's folder, or in the Trainer's ``default_root_dir``.
            Where a run is there already, the name gets a number. If that folder is a URL, in the working directory.
        spans_every: Of each how many-th step the whole timeline is written, for pictures, beside the first few and
            those that were unusually slow.
        count_tokens: Tokens of a batch, for those that are not a tensor of whole numbers [samples x length].
        flops_per_sample: Floating point operations of forward and backward for one sample, for the utilisation of the
            device (MFU).
        count_flops: Count them in the first batch, which takes several times as long, if they are not given.
        peak_flops: What a rank's device can do at most, in operations a second; known devices need none.

    Raises:
        ConfigError: The folder is a URL.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        spans_every: int = 100,
        count_tokens: CountTokens | None = None,
        flops_per_sample: float | None = None,
        count_flops: bool = False,
        peak_flops: float | None = None,
    ) -> None:
        if spans_every < 1:
            raise ValueError(f"spans_every={spans_every}: write a whole number from 1, e.g. 100")
        check_local("StepTimeline(folder)", folder)
        self._wanted = folder
        self._spans_every = spans_every
        self._count_tokens = count_tokens
        self._flops_per_sample = flops_per_sample
        self._count_flops = count_flops and flops_per_sample is None
        self._peak_flops = peak_flops
        self._files: StepFiles | None = None
        self.is_read = False  # whether another callback, or a doctor, says what is in its files
        self.capture: TrainerCapture | None = None

    @property
    def folder(self) -> Path | None:
        """Of the present run, or the last one; ``None``: there was none, or nothing could be written."""
        return self._files.folder if self._files is not None else None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Start to record; collective."""
        if stage != "fit":
            return
        self._close()
        self.capture = self._files = None  # those of another fit
        try:
            self._open(trainer)
        except Exception as error:
            say(f"StepTimeline records nothing, and training goes on: {type(error).__name__}: {error}")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Now the loaders are there: say what is known of the run."""
        if self._files is not None:
            self._files.open(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write what is left, and say how it is read."""
        files = self._files
        is_good = self._close()
        if stage == "fit" and is_good and not self.is_read and files is not None and files.num_steps:
            assert files.folder is not None
            rank_zero_info(f"hierdist: where the steps' time went says: hierdist report {shown_path(files.folder)}")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write what is left: the Trainer tears nothing down."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """Nothing outlives a run."""
        return {}

    def _open(self, trainer: pl.Trainer) -> None:
        self.capture = capture_of(trainer, self)
        self.capture.count_tokens = self._count_tokens or self.capture.count_tokens
        if self._count_flops:
            self.capture.count_flops()
        self._files = StepFiles(
            self.capture,
            folder=self.capture.folder(self._wanted),
            spans_every=self._spans_every,
            flops_per_sample=self._flops_per_sample,
            peak_flops=self._peak_flops,
        )

    def _close(self) -> bool:
        """Whether all is written."""
        if self.capture is not None:
            self.capture.release(self)
        problem = self._files.close() if self._files is not None else None
        if problem is not None:
            say(f"StepTimeline: {problem}")
        return problem is None
