"""What a Trainer's thread does, as spans: its loops, its strategy and its loggers are wrapped while it trains.

Note [Steps]
    A step ends where the loop turns to the next batch after an optimizer has stepped. So validation, checkpoints and
    what is logged after a step belong to it, and the wait for its batches does. After the last batch, it ends where the
    loop ends.

Note [In bursts]
    While a step goes on its marks are kept, and little else is done. Some steps at a time, after a quarter of a second
    at the latest, are cut in a thread of their own, while the training thread computes or waits; that tells them when
    it hands over the next ones. Between two stretches of computing, each look at a step would find the processor's
    caches cold and take three times as long.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.capture.backward_end import EndOfCompute
from lightning_dist.capture.batches import CountTokens, measure, together
from lightning_dist.capture.collectives import Watched, watch_call, watch_collectives, watch_dtensor
from lightning_dist.capture.device_times import COMPUTE, DeviceTimes
from lightning_dist.capture.flops import FlopCount
from lightning_dist.capture.patches import Patches
from lightning_dist.capture.reducer import ReducerWatch
from lightning_dist.capture.run_folder import run_folder
from lightning_dist.capture.saying import say
from lightning_dist.events import Event, EventStream, Mark
from lightning_dist.monitor.record import Phase, StepRecord
from lightning_dist.monitor.steps import TAIL, Batches, CutStep, Piece, StepCutter

_OWN_EVENTS = 4096  # of a stream that only the capture reads
_MOST_PENDING = 200_000  # events, and pieces, of one step; what is before them is forgotten
_COUNTED = (Phase.FORWARD, Phase.BACKWARD)
_LATEST_S = 2.0  # how long the end of a fit waits for a device's last moments
_ATTRIBUTE = "_hierdist_capture"

_MOST_UNCUT = 64
_LONGEST_NS = 250_000_000
_CUTTING_S = 30.0  # a batch of steps takes milliseconds

_Uncut = tuple[int, int, int, list[Piece], list[Event], Batches]
OnStep = Callable[[StepRecord], None]
OnCut = Callable[[CutStep], None]


def capture_of(trainer: pl.Trainer, holder: object) -> TrainerCapture:
    """The capture of a Trainer's fit, opened by the first who asks, until each has called its ``release``.

    To be called in a callback's ``setup``, on every rank.

    Args:
        trainer: Whose process group is there.
        holder: Who asks; asking twice counts once.
    """
    capture: TrainerCapture | None = getattr(trainer, _ATTRIBUTE, None)
    if capture is None or capture.is_closed:
        capture = TrainerCapture(trainer)
        setattr(trainer, _ATTRIBUTE, capture)
    capture.hold(holder)
    return capture


class TrainerCapture:
    """Spans of one Trainer's fit, cut into steps.

    What goes wrong in it ends the capture, with a warning, and never the training: see :attr:`problem`.

    Args:
        trainer: Whose process group is there.
        clock_ns: Monotonic clock, where the strategy has no event stream with one.
    """

    def __init__(self, trainer: pl.Trainer, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.rank = trainer.global_rank
        self.problem: str | None = None
        self.unavailable: dict[str, str] = {}
        self.count_tokens: CountTokens | None = None
        self.flops: FlopCount | None = None
        self.flops_per_sample: float | None = None  # as counted
        events = getattr(trainer.strategy, "events", None)
        self._owns_events = not isinstance(events, EventStream)
        self.events: EventStream = (
            EventStream(rank=self.rank, capacity=_OWN_EVENTS, clock_ns=clock_ns)
            if not isinstance(events, EventStream)
            else events
        )
        self._trainer = trainer
        self._clock = _clock_of(trainer.strategy.root_device, self.events)
        self._holders: set[int] = set()
        self._patches = Patches()
        self._mark: Callable[[], Mark] = self.events.clock_ns if self._clock is None else self._clock.mark
        self._phases: deque[Piece] = deque(maxlen=_MOST_PENDING)
        self._uncut: deque[_Uncut] = deque()
        self._being_cut: deque[Future[list[CutStep]]] = deque()
        self._cutting = ThreadPoolExecutor(1, thread_name_prefix="hierdist-capture")
        self._pending: deque[Event] = deque(maxlen=_MOST_PENDING)
        self._on_step: list[OnStep] = []
        self._on_cut: list[OnCut] = []
        self._start_ns: int | None = None
        self._is_running = False
        self._step = 0
        self._batches: Batches | None = None
        self._fetch_started: Mark = 0
        self._reducer: ReducerWatch | None = None
        self._folder: Path | None = None
        self._folder_is_known = False
        self.is_closed = False
        thread = threading.get_ident() if self._clock is None else COMPUTE
        unseen = _unseen(trainer, owns_events=self._owns_events)
        if unseen is not None:
            self.unavailable[Phase.COMMUNICATION.value] = unseen
        self.cutter = StepCutter(
            self.rank,
            thread=thread,
            unknown=() if unseen is None else [Phase.COMMUNICATION],
            sees_communication=unseen is None,
        )
        try:
            self._open()
        except Exception:
            self.close()
            raise

    # -- who uses it --------------------------------------------------------------------------------------------------

    def hold(self, holder: object) -> None:
        """Keep it open for someone."""
        self._holders.add(id(holder))

    def release(self, holder: object) -> None:
        """Let it go; the last one to do so closes it. Safe to call twice."""
        self._holders.discard(id(holder))
        if not self.is_closed:
            self._guarded(self._tell, at_once=True)
        if not self._holders:
            self.close()

    def on_step(self, call: OnStep) -> None:
        """Call ``call`` with each step from now on, in the training thread, until the capture closes.

        Steps come in bursts, in order, half a second late where steps are short; the last ones when the loop ends.
        """
        self._on_step.append(call)

    def on_cut(self, call: OnCut) -> None:
        """Like :meth:`on_step`, with what the step was made of."""
        self._on_cut.append(call)

    def count_flops(self) -> None:
        """Count what a sample takes, in the first batch; not where a rank computes a part of the model only."""
        parallel = getattr(self._trainer.strategy, "parallel_config", None)
        if parallel is not None and (parallel.splits or parallel.stages):
            self.unavailable["flops"] = f"under parallel={parallel.mode} a rank computes a part of the model only"
        else:
            self.flops = FlopCount()

    def folder(self, wanted: str | Path | None = None) -> Path | None:
        """Where the run's files go, as the first who asks wants it; collective. ``None``: it cannot be made."""
        if not self._folder_is_known:
            self._folder, self._folder_is_known = run_folder(self._trainer, wanted), True
        return self._folder

    def close(self) -> None:
        """Leave the Trainer as it was. Safe to call twice."""
        if self.is_closed:
            return
        self.is_closed = True
        self._cutting.shutdown(cancel_futures=True)
        self._patches.undo()
        if self._reducer is not None:
            self._reducer.release()
            self._reducer = None
        self.events.remove_sink(self._pending.append)
        self.events.device_clock = None
        self._pending.clear()
        self._on_step.clear()
        self._on_cut.clear()
        if getattr(self._trainer, _ATTRIBUTE, None) is self:
            delattr(self._trainer, _ATTRIBUTE)

    # -- what is wrapped ----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        trainer, strategy = self._trainer, self._trainer.strategy
        loop = trainer.fit_loop.epoch_loop
        self.events.device_clock = self._clock
        self.events.add_sink(self._pending.append)
        self._wrap(trainer.fit_loop, "on_run_end", self._before(self._end_of_loop), None)
        self._wrap(loop, "advance", self._before(self._next_batch), None)
        self._wrap(strategy, "on_train_batch_start", self._before(self._read_batch), None)
        self._wrap(loop, "_on_before_fetch", self._before(self._fetch_starts), Phase.DATA_WAIT)
        self._wrap(loop, "_on_after_fetch", self._before(self._fetch_ends), Phase.DATA_WAIT)
        self._span(loop, "on_run_start", Phase.DATA_WAIT)  # it makes the loader's iterator
        self._span(strategy, "batch_to_device", Phase.HOST_TO_DEVICE)
        self._span(strategy, "training_step", Phase.FORWARD)
        self._wrap(strategy, "backward", self._around_backward, Phase.BACKWARD)
        self._span(strategy, "optimizer_step", Phase.OPTIMIZER)
        self._span(strategy.precision_plugin, "clip_gradients", Phase.OPTIMIZER)
        self._span(trainer, "save_checkpoint", Phase.CHECKPOINT)
        for saver in trainer.checkpoint_callbacks:
            if hasattr(saver, "_save_checkpoint"):  # AsyncShardedCheckpoint may save beside the Trainer
                self._span(saver, "_save_checkpoint", Phase.CHECKPOINT)
        self._span(loop.val_loop, "run", Phase.VALIDATION)
        self._span(trainer._logger_connector, "log_metrics", Phase.LOGGING)
        for logger in trainer.loggers:
            self._span(logger, "log_metrics", Phase.LOGGING)
            self._span(logger, "save", Phase.LOGGING)
        if trainer.world_size > 1:
            self._open_communication()

    def _open_communication(self) -> None:
        """What ranks ask each other for; our strategies say so themselves, but for what Lightning asks beside them."""
        trainer = self._trainer
        watched = Watched(self.events, tier=self._tier, is_on=lambda: not self.is_closed)
        if self._owns_events:
            watch_collectives(self._patches, watched)
            watch_dtensor(self._patches, watched)
        else:
            watch_call(self._patches, watched, trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor")
            # Layers are shared inside a host.
            watch_dtensor(self._patches, Watched(self.events, tier="host", is_on=lambda: not self.is_closed))

    @property
    def _tier(self) -> str:
        """The slowest that an operation of all ranks crosses, as far as Lightning knows."""
        return "host" if self._trainer.num_nodes == 1 else "world"

    def _span(self, owner: Any, name: str, phase: Phase) -> None:
        self._wrap(owner, name, functools.partial(self._timed, phase), phase)

    def _wrap(self, owner: Any, name: str, make: Callable[[Any], Any], phase: Phase | None) -> None:
        try:
            self._patches.replace(owner, name, make)
        except AttributeError as error:
            what = phase.value if phase is not None else "steps"
            self.unavailable.setdefault(
                what, f"this version of Lightning has no {type(owner).__name__}.{name}: {error}"
            )

    def _timed(self, phase: Phase, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_closed:
                return original(*args, **kwargs)
            start = self._mark()
            try:
                if self.flops is not None and self.flops.is_counting and phase in _COUNTED:
                    return self.flops.counted(functools.partial(original, *args, **kwargs))
                return original(*args, **kwargs)
            finally:
                self._did(phase, start)

        return call

    def _did(self, phase: Phase, start: Mark) -> None:
        """From then until now."""
        end: Mark = self._mark()
        if self._clock is None:
            self._phases.append(Piece(start, end, phase))
        else:
            self._clock.when_known((start, end), lambda a, b: self._phases.append(Piece(a, b, phase)))

    def _before(self, act: Callable[..., None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Act before the method, with its arguments; what goes wrong in it is ours alone."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                if not self.is_closed:
                    self._guarded(act, *args, **kwargs)
                return original(*args, **kwargs)

            return call

        return make

    def _around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed(Phase.BACKWARD, original)

        @functools.wraps(original)
        def call(loss: Any, *args: Any, **kwargs: Any) -> Any:
            model = self._trainer.strategy.model
            # Where gradients are accumulated the reducer sends nothing.
            if self.is_closed or not isinstance(model, DistributedDataParallel) or not model.require_backward_grad_sync:
                return timed(loss, *args, **kwargs)
            watch = self._reducer_of(model)
            computed = EndOfCompute(loss, self.events.mark)
            if watch is not None:
                watch.begin()
            try:
                return timed(loss, *args, **kwargs)
            finally:
                computed.release()
                if computed.at is not None and not self.is_closed:
                    end = self.events.mark()
                    self.events.span_from(TAIL, computed.at, end=end)
                    if watch is not None:
                        self._guarded(watch.end, computed.at, end)

        return call

    def _reducer_of(self, model: DistributedDataParallel) -> ReducerWatch | None:
        """What watches its buckets; ours are sent by lanes, which say so themselves."""
        if not self._owns_events:
            return None
        if self._reducer is None or self._reducer.model is not model:
            if self._reducer is not None:
                self._reducer.release()
            self._reducer = ReducerWatch(model, self.events, tier=self._tier)
        return self._reducer

    # -- what happens -------------------------------------------------------------------------------------------------

    def _fetch_starts(self) -> None:
        self._fetch_started = self.events.mark()

    def _fetch_ends(self) -> None:
        self._did(Phase.DATA_WAIT, self._fetch_started)

    def _read_batch(self, batch: Any, batch_idx: int) -> None:
        by_module = isinstance(self._trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher)
        read = Batches(1) if by_module else measure(batch, self.count_tokens)  # the module is still to ask for it
        self._batches = together(self._batches, read)

    def _next_batch(self, data_fetcher: Any) -> None:
        if self.flops is not None and self._batches is not None and self.flops.is_counting:
            self.flops.is_counting = False
            self.flops_per_sample = self.flops.per_sample(self._batches.samples)
            if self.flops.problem is not None:
                say(f"floating point operations are not counted, and training goes on: {self.flops.problem}")
        if not self._is_running or self._trainer.global_step != self._step:
            self._step_ends()
        if self._clock is not None:
            self._clock.read()

    def _end_of_loop(self) -> None:
        if self._is_running and self._trainer.global_step != self._step:
            self._step_ends()
        self._is_running = False
        if self._clock is not None and self._clock.read_within(_LATEST_S):
            self.problem = f"the device has not come to the end of the last steps within {_LATEST_S:g} s"
        self._start_ns = None
        self._tell(at_once=True)

    def _step_ends(self) -> None:
        """A step ends here, unless none was running, and the next one begins."""
        batches = self._batches if self._batches is not None and self._is_running else None
        end, step = self.events.mark(), self._step
        self._step = self.events.step = self._trainer.global_step
        self._batches, self._is_running = None, True
        if self._clock is None:
            self._cut(end, step, batches)
            return
        clock = self._clock

        def known(end_ns: int) -> None:
            clock.measure_from(end)
            self._cut(end_ns, step, batches)

        clock.when_known((end,), known)

    def _cut(self, end_ns: int, step: int, batches: Batches | None) -> None:
        """What has been seen so far is the step's; it is looked at with others, see Note [In bursts]."""
        start_ns, self._start_ns = self._start_ns, end_ns
        phases, self._phases = list(self._phases), deque(maxlen=_MOST_PENDING)
        events = [self._pending.popleft() for _ in range(len(self._pending))]
        if start_ns is None:
            return
        self._uncut.append((step, start_ns, end_ns, phases, events, batches if batches is not None else Batches()))
        if len(self._uncut) >= _MOST_UNCUT or end_ns - self._uncut[0][1] > _LONGEST_NS:
            self._tell()

    def _tell(self, *, at_once: bool = False) -> None:
        """Have the steps cut that have been waiting, and tell who listens of those that are.

        Args:
            at_once: Wait for all of them.
        """
        if self._uncut:
            waiting, self._uncut = self._uncut, deque()
            self._being_cut.append(self._cutting.submit(_cut_all, self.cutter, waiting))
        while self._being_cut and (at_once or self._being_cut[0].done()):
            for cut in self._being_cut.popleft().result(_CUTTING_S):
                for on_step in self._on_step:
                    on_step(cut.record)
                for on_cut in self._on_cut:
                    on_cut(cut)

    def _guarded(self, act: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """What goes wrong in it is ours alone."""
        try:
            act(*args, **kwargs)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._uncut.clear()
        self._being_cut.clear()
        self.problem = f"{type(error).__name__}: {error}"
        self.close()
        say(f"rank {self.rank} records no more steps, and training goes on: {self.problem}")


def _cut_all(cutter: StepCutter, steps: Iterable[_Uncut]) -> list[CutStep]:
    return [cutter.cut(*step) for step in steps]


def _clock_of(device: torch.device, events: EventStream) -> DeviceTimes | None:
    """What notes a device's moments; elsewhere the host's clock does."""
    return DeviceTimes(device, events.clock_ns) if device.type == "cuda" else None


def _unseen(trainer: pl.Trainer, *, owns_events: bool) -> str | None:
    """Why what ranks send each other is not seen; ``None``: it is."""
    strategy = trainer.strategy
    is_seen = isinstance(strategy, DDPStrategy | ModelParallelStrategy) and not isinstance(strategy, DeepSpeedStrategy)
    if trainer.world_size == 1 or not owns_events or is_seen:
        return None
    return f"what {type(strategy).__name__} sends, and what waits for it, is not seen"
