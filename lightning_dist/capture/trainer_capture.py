"""What a Trainer's thread does, as spans: its loops, its strategy and its loggers are wrapped while it trains.

Note [Steps]
    A step ends where the loop turns to the next batch after an optimizer has stepped. So validation, checkpoints and
    what is logged after a step belong to it, and the wait for its batches does. After the last batch, it ends where the
    loop ends.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.capture.backward_end import EndOfCompute
from lightning_dist.capture.batches import CountTokens, measure, together
from lightning_dist.capture.patches import Patches
from lightning_dist.capture.reducer import ReducerWatch
from lightning_dist.capture.run_folder import run_folder
from lightning_dist.events import Event, EventStream
from lightning_dist.monitor.record import Phase, StepRecord
from lightning_dist.monitor.steps import SPAN_OF_PHASE, TAIL, Batches, CutStep, StepCutter

_OWN_EVENTS = 4096  # of a stream that only the capture reads
_MOST_PENDING = 200_000  # events of one step; what is before them is forgotten
_ATTRIBUTE = "_hierdist_capture"

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
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.rank = trainer.global_rank
        self.problem: str | None = None
        self.unavailable: dict[str, str] = {}
        self.count_tokens: CountTokens | None = None
        events = getattr(trainer.strategy, "events", None)
        self._owns_events = not isinstance(events, EventStream)
        self.events: EventStream = (
            EventStream(rank=self.rank, capacity=_OWN_EVENTS) if not isinstance(events, EventStream) else events
        )
        self._trainer = trainer
        self._thread = threading.get_ident()
        self._holders: set[int] = set()
        self._patches = Patches()
        self._pending: deque[tuple[Event, bool]] = deque(maxlen=_MOST_PENDING)
        self._on_step: list[OnStep] = []
        self._on_cut: list[OnCut] = []
        self._start_ns: int | None = None
        self._step = 0
        self._batches: Batches | None = None
        self._fetch_started_ns = 0
        self._reducer: ReducerWatch | None = None
        self._folder: Path | None = None
        self._folder_is_known = False
        self.is_closed = False
        self.cutter = StepCutter(self.rank)
        self._open()

    # -- who uses it --------------------------------------------------------------------------------------------------

    def hold(self, holder: object) -> None:
        """Keep it open for someone."""
        self._holders.add(id(holder))

    def release(self, holder: object) -> None:
        """Let it go; the last one to do so closes it. Safe to call twice."""
        self._holders.discard(id(holder))
        if not self._holders:
            self.close()

    def on_step(self, call: OnStep) -> None:
        """Call ``call`` with each step from now on, in the training thread, until the capture closes."""
        self._on_step.append(call)

    def on_cut(self, call: OnCut) -> None:
        """Like :meth:`on_step`, with what the step was made of."""
        self._on_cut.append(call)

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
        self._patches.undo()
        if self._reducer is not None:
            self._reducer.release()
            self._reducer = None
        self.events.remove_sink(self._take)
        self._pending.clear()
        self._on_step.clear()
        self._on_cut.clear()
        if getattr(self._trainer, _ATTRIBUTE, None) is self:
            delattr(self._trainer, _ATTRIBUTE)

    # -- what is wrapped ----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        trainer, strategy = self._trainer, self._trainer.strategy
        loop = trainer.fit_loop.epoch_loop
        self.events.add_sink(self._take)
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
        self._span(loop.val_loop, "run", Phase.VALIDATION)
        self._span(trainer._logger_connector, "log_metrics", Phase.LOGGING)
        for logger in trainer.loggers:
            self._span(logger, "log_metrics", Phase.LOGGING)
            self._span(logger, "save", Phase.LOGGING)
        if trainer.world_size > 1:
            self._open_communication()

    def _open_communication(self) -> None:
        """What the training thread asks other ranks for; our strategies say so themselves, but for Lightning's own."""
        strategy = self._trainer.strategy
        self._wrap(self._trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", self._operation("broadcast"), None)
        if self._owns_events:
            for name in ("reduce", "broadcast", "barrier", "all_gather"):
                self._wrap(strategy, name, self._operation(name), None)

    def _span(self, owner: Any, name: str, phase: Phase) -> None:
        self._wrap(owner, name, functools.partial(self._timed, SPAN_OF_PHASE[phase]), phase)

    def _wrap(self, owner: Any, name: str, make: Callable[[Any], Any], phase: Phase | None) -> None:
        try:
            self._patches.replace(owner, name, make)
        except AttributeError as error:
            what = phase.value if phase is not None else "steps"
            self.unavailable.setdefault(
                what, f"this version of Lightning has no {type(owner).__name__}.{name}: {error}"
            )

    def _timed(self, span: str, original: Callable[..., Any]) -> Callable[..., Any]:
        events, clock_ns = self.events, self.events.clock_ns

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            start_ns = clock_ns()
            try:
                return original(*args, **kwargs)
            finally:
                if not self.is_closed:
                    events.span(span, start_ns)

        return call

    def _operation(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        events, clock_ns = self.events, self.events.clock_ns

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                start_ns = clock_ns()
                try:
                    return original(*args, **kwargs)
                finally:
                    if not self.is_closed:
                        events.span("comm.trainer", start_ns, lane="trainer", operation=name)

            return call

        return make

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
        timed = self._timed(SPAN_OF_PHASE[Phase.BACKWARD], original)

        @functools.wraps(original)
        def call(loss: Any, *args: Any, **kwargs: Any) -> Any:
            model = self._trainer.strategy.model
            if self.is_closed or not isinstance(model, DistributedDataParallel):
                return timed(loss, *args, **kwargs)
            watch = self._reducer_of(model)
            if not model.require_backward_grad_sync:  # gradients are accumulated
                return timed(loss, *args, **kwargs)
            computed = EndOfCompute(loss, self.events.clock_ns)
            if watch is not None:
                watch.begin()
            try:
                return timed(loss, *args, **kwargs)
            finally:
                computed.release()
                if computed.at_ns is not None:
                    end_ns = self.events.clock_ns()
                    self.events.span(TAIL, computed.at_ns, end_ns=end_ns)
                    if watch is not None:
                        self._guarded(watch.end, computed.at_ns, end_ns)

        return call

    def _reducer_of(self, model: DistributedDataParallel) -> ReducerWatch | None:
        """What watches its buckets; ours are sent by lanes, which say so themselves."""
        if not self._owns_events:
            return None
        if self._reducer is None or self._reducer.model is not model:
            if self._reducer is not None:
                self._reducer.release()
            tier = "host" if self._trainer.num_nodes == 1 else "world"
            self._reducer = ReducerWatch(model, self.events, tier=tier)
        return self._reducer

    # -- what happens -------------------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        self._pending.append((event, threading.get_ident() == self._thread))

    def _fetch_starts(self) -> None:
        self._fetch_started_ns = self.events.clock_ns()

    def _fetch_ends(self) -> None:
        self.events.span(SPAN_OF_PHASE[Phase.DATA_WAIT], self._fetch_started_ns)

    def _read_batch(self, batch: Any, batch_idx: int) -> None:
        self._batches = together(self._batches, measure(batch, self.count_tokens))

    def _next_batch(self, data_fetcher: Any) -> None:
        now_ns = self.events.clock_ns()
        if self._start_ns is None:
            self._pending.clear()
            self._begin(now_ns)
        elif self._trainer.global_step != self._step:
            self._cut(now_ns)

    def _end_of_loop(self) -> None:
        if self._start_ns is not None and self._trainer.global_step != self._step:
            self._cut(self.events.clock_ns())
        self._start_ns = None

    def _begin(self, now_ns: int) -> None:
        self._start_ns = now_ns
        self._step = self._trainer.global_step
        self._batches = None
        self.events.step = self._step

    def _cut(self, end_ns: int) -> None:
        assert self._start_ns is not None
        events = [self._pending.popleft() for _ in range(len(self._pending))]
        batches = self._batches if self._batches is not None else Batches()
        cut = self.cutter.cut(self._step, self._start_ns, end_ns, events, batches)
        self._begin(end_ns)
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
        self.problem = f"{type(error).__name__}: {error}"
        self.close()
        rank_zero_warn(f"steps are no longer recorded, and training goes on: {self.problem}")
