"""A Trainer's steps on one device, by a clock that only the test moves: each phase is exactly what took its time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_dist.capture import trainer_capture
from lightning_dist.capture.trainer_capture import TrainerCapture
from lightning_dist.monitor.record import StepRecord

MS = 1_000_000


class Clock:
    """Stands still but for what passes."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def passes(self, ms: int) -> None:
        self.now_ns += ms * MS


class Numbers(Dataset[Any]):
    def __init__(self, clock: Clock, count: int) -> None:
        self._clock = clock
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        self._clock.passes(1)
        return torch.ones(3), torch.tensor(index)


class Stream(IterableDataset[Any]):
    def __init__(self, clock: Clock, sizes: list[int]) -> None:
        self._clock = clock
        self._sizes = sizes

    def __iter__(self) -> Iterator[Any]:
        for size in self._sizes:
            self._clock.passes(2)
            yield torch.ones(size, 3)


class Passing(torch.autograd.Function):
    """Takes its time in backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, clock: Clock) -> torch.Tensor:
        ctx.clock = clock
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.clock.passes(7)
        return gradients[0], None


class SlowSGD(torch.optim.SGD):
    clock: Clock

    def step(self, closure: Any = None) -> Any:
        given = super().step(closure)
        self.clock.passes(11)
        return given


class SlowLogger(CSVLogger):
    clock: Clock

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.clock.passes(13)


class Module(pl.LightningModule):
    """Each part takes a time of its own, in milliseconds of the clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1)
        self.clock = clock

    def loss(self, batch: Any) -> torch.Tensor:
        x = batch[0] if isinstance(batch, list | tuple) else batch
        self.clock.passes(5)
        return Passing.apply(self.net(x).pow(2).mean(), self.clock)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.clock.passes(3)
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = SlowSGD(self.parameters(), lr=0.1)
        optimizer.clock = self.clock
        return optimizer

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.clock.passes(19)
        super().configure_gradient_clipping(*args, **kwargs)


class Validated(Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.passes(17)


class Recorder(pl.Callback):
    """Keeps the steps of a capture by the test's clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.steps: list[StepRecord] = []
        self.capture: TrainerCapture | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.capture = TrainerCapture(trainer, clock_ns=self.clock)
        self.capture.hold(self)
        self.capture.on_step(self.steps.append)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        assert self.capture is not None
        self.capture.release(self)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self.capture is not None:
            self.capture.release(self)


def trainer_of(*callbacks: pl.Callback, **arguments: Any) -> pl.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "barebones": False}
    defaults: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    return pl.Trainer(**{**defaults, "max_epochs": 1, **quiet, **arguments}, callbacks=list(callbacks))


def ms(step: StepRecord) -> dict[str, float]:
    return {phase.value: round(seconds * 1e3, 6) for phase, seconds in step.phases.items() if seconds}


def test_each_part_of_a_step_goes_to_its_phase(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    recorder, logger = Recorder(clock), SlowLogger(tmp_path)
    logger.clock = clock
    checkpoint = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=2, save_top_k=-1)
    trainer = trainer_of(
        recorder,
        checkpoint,
        logger=logger,
        log_every_n_steps=1,
        accumulate_grad_batches=2,
        val_check_interval=4,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
    )
    save = trainer.strategy.save_checkpoint
    monkeypatch.setattr(trainer.strategy, "save_checkpoint", lambda *a, **k: (clock.passes(23), save(*a, **k)))
    loaders = DataLoader(Numbers(clock, 12), batch_size=2), DataLoader(Numbers(clock, 2), batch_size=1)
    trainer.fit(Validated(clock), *loaders)
    step = {"data_wait": 4, "host_to_device": 6, "forward": 10, "backward": 14, "optimizer": 11 + 19, "logging": 13}
    validation = {"validation": 2 * (1 + 3 + 17)}
    assert [ms(each) for each in recorder.steps] == [step, {**step, **validation, "checkpoint": 23}, step]
    assert [(each.step, each.micro_batches, each.samples) for each in recorder.steps] == [
        (0, 2, 4),
        (1, 2, 4),
        (2, 2, 4),
    ]
    assert [each.batch_bytes for each in recorder.steps] == [2 * 2 * (12 + 8)] * 3
    assert sum(each.duration_s for each in recorder.steps) * 1e9 == pytest.approx(clock.now_ns)


class Manual(Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [super().configure_optimizers(), super().configure_optimizers()]  # type: ignore[safe-super]


def test_manual_optimization_with_two_optimizers_is_one_step_a_batch() -> None:
    clock = Clock()
    recorder = Recorder(clock)
    trainer_of(recorder).fit(Manual(clock), DataLoader(Numbers(clock, 4), batch_size=2))
    step = {"data_wait": 2, "host_to_device": 3, "forward": 10, "backward": 14, "optimizer": 22}
    assert [ms(each) for each in recorder.steps] == [step, step]
    assert [each.step for each in recorder.steps] == [0, 2]


def test_prefetched_batches_of_changing_sizes() -> None:
    clock = Clock()
    recorder = Recorder(clock)
    trainer_of(recorder, max_epochs=2).fit(Module(clock), DataLoader(Stream(clock, [4, 1, 6]), batch_size=None))
    assert [each.samples for each in recorder.steps] == [4, 1, 6] * 2
    # One batch is read ahead: before the first epoch, in no step; then in the steps before, the last of which has none.
    assert [ms(each).get("data_wait", 0) for each in recorder.steps] == [2, 2, 2, 2, 2, 0]
    assert all(ms(each)["forward"] == 5 for each in recorder.steps)


class Asking(Module):
    """Takes the loader itself."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> torch.Tensor:
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


def test_a_module_that_asks_the_loader_itself_waits_for_data_inside_its_step() -> None:
    clock = Clock()
    recorder = Recorder(clock)
    with pytest.warns(UserWarning, match="dataloader_iter"):
        trainer_of(recorder).fit(Asking(clock), DataLoader(Stream(clock, [4, 4]), batch_size=None))
    assert [ms(each)["data_wait"] for each in recorder.steps] == [2, 2]
    assert [ms(each)["forward"] for each in recorder.steps] == [5, 5]
    assert [each.samples for each in recorder.steps] == [None, None]


def state_of(trainer: pl.Trainer) -> list[set[str]]:
    loop = trainer.fit_loop
    parts = (loop, loop.epoch_loop, loop.epoch_loop.val_loop, trainer.strategy, trainer._logger_connector, trainer)
    return [set(vars(part)) for part in (*parts, trainer.strategy.precision_plugin)]


def test_a_fit_leaves_the_trainer_as_it_was_and_another_one_is_recorded_too() -> None:
    clock = Clock()
    recorder = Recorder(clock)
    trainer = trainer_of(recorder)
    module, loader = Module(clock), DataLoader(Numbers(clock, 4), batch_size=2)
    plain = trainer_of(max_epochs=1)
    plain.fit(Module(clock), loader)
    trainer.fit(module, loader)
    assert state_of(trainer) == state_of(plain)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader)
    assert [each.step for each in recorder.steps] == [0, 1, 2, 3]
    assert recorder.capture is not None
    assert recorder.capture.is_closed


class Failing(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1:
            raise ValueError("the user's")
        return self.loss(batch)


def test_an_exception_leaves_the_trainer_as_it_was() -> None:
    clock = Clock()
    recorder = Recorder(clock)
    trainer = trainer_of(recorder)
    before = state_of(trainer)
    with pytest.raises(ValueError, match="the user's"):
        trainer.fit(Failing(clock), DataLoader(Numbers(clock, 6), batch_size=2))
    assert all("__wrapped__" not in dir(value) for value in vars(trainer.strategy).values())
    assert [late - early for early, late in zip(before, state_of(trainer), strict=True)][3] <= {"_optimizers"}
    assert [each.step for each in recorder.steps] == [0]


class Breaking(Recorder):
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        assert self.capture is not None
        self.capture.on_step(self.fails)

    def fails(self, step: StepRecord) -> None:
        raise RuntimeError("the listener's")


def test_a_capture_that_fails_ends_and_training_goes_on() -> None:
    clock = Clock()
    broken, module, plain = Breaking(clock), Module(clock), Module(clock)
    trainer = trainer_of(broken)
    with pytest.warns(UserWarning, match="training goes on: RuntimeError: the listener's"):
        trainer.fit(module, DataLoader(Numbers(clock, 6), batch_size=2))
    assert trainer.global_step == 3
    assert [each.step for each in broken.steps] == [0]
    trainer_of().fit(plain, DataLoader(Numbers(clock, 6), batch_size=2))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))


class Counting(Recorder):
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        assert self.capture is not None
        self.capture.count_flops()


def test_operations_are_counted_in_the_first_batch_only() -> None:
    clock = Clock()
    recorder = Counting(clock)
    trainer_of(recorder).fit(Module(clock), DataLoader(Numbers(clock, 6), batch_size=2))
    assert recorder.capture is not None
    # 3 products and 3 sums a sample in forward, and as many for the gradient of the weights.
    assert recorder.capture.flops_per_sample == 12
    assert recorder.capture.flops is not None
    assert recorder.capture.flops.total == 24


def test_a_backward_inside_a_training_step_is_counted_once() -> None:
    clock = Clock()
    recorder = Counting(clock)
    trainer_of(recorder).fit(Manual(clock), DataLoader(Numbers(clock, 6), batch_size=2))
    assert recorder.capture is not None
    assert recorder.capture.flops_per_sample == 2 * 12  # two losses a batch


class Own(Manual):
    """Its optimizers are stepped behind Lightning's back."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizers, list)
        for optimizer in optimizers:
            self.manual_backward(self.loss(batch))
            optimizer.step()


def test_a_step_that_never_ends_takes_no_more_memory_than_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_capture, "_MOST_PENDING", 10)
    clock = Clock()
    recorder = Recorder(clock)
    trainer_of(recorder).fit(Own(clock), DataLoader(Numbers(clock, 40), batch_size=2))
    assert recorder.capture is not None
    assert recorder.steps == []
    assert len(recorder.capture._phases) == 10
