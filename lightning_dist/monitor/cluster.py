"""What a rank watches beside its own steps: its machine, the network, the other ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_dist.errors import ConfigError
from lightning_dist.events import Event
from lightning_dist.monitor.alarms import Alarms
from lightning_dist.monitor.heartbeat import Heartbeat
from lightning_dist.monitor.rank_file import RankWriter
from lightning_dist.monitor.record import RankHeader, Sample, Span, StepRecord
from lightning_dist.monitor.sampling.opening import open_sources
from lightning_dist.monitor.sampling.sampler import Listener, Sampler
from lightning_dist.monitor.sampling.source import Source
from lightning_dist.monitor.step_series import CheckpointWriteSource, StepSource


@dataclasses.dataclass(frozen=True)
class WatchSettings:
    """How often what is looked at.

    Attributes:
        interval_s: Between two samples, in seconds.
        heartbeat_s: Between two beats, in seconds.
        heartbeat_timeout_s: Without a beat for so long a rank is late, in seconds.
    """

    interval_s: float = 1.0
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 15.0

    def __post_init__(self) -> None:
        for name in ("interval_s", "heartbeat_s", "heartbeat_timeout_s"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0.01 <= value < math.inf):
                raise ConfigError(f"{name}={value!r}: write a number of seconds, at least 0.01")
        if self.heartbeat_timeout_s < 3 * self.heartbeat_s:
            raise ConfigError(
                f"heartbeat_timeout_s={self.heartbeat_timeout_s:g} with heartbeat_s={self.heartbeat_s:g}: a rank that "
                f"is late once is not to be taken for stopped; write at least {3 * self.heartbeat_s:g}"
            )


class ClusterWatch:
    """Samples the metrics of a rank into its file, from a thread, until it is closed. Nothing here raises later on.

    Args:
        folder: The run's; ``None``: it cannot be made, and what is sampled goes to listeners only.
        header: Who writes; what cannot be measured here is added.
        settings: How often.
        device: What the rank trains on.
        steps: How many steps there were by now.
        store: Of the default process group; ``None``: there is none.
        world_size: Number of ranks.
        checkpoint_event: Name of the span of a checkpoint's write in the background.
        writes_at_once: Whether checkpoints are written while training stands still.
        say: Takes a sentence for the user.
        agent_timeouts: Hangs that the agent of this host has found, where this rank is to tell them.
    """

    def __init__(
        self,
        folder: Path | None,
        header: RankHeader,
        settings: WatchSettings,
        *,
        device: torch.device,
        steps: Callable[[], int],
        store: dist.Store | None,
        world_size: int,
        checkpoint_event: str,
        writes_at_once: bool,
        say: Callable[[str], None],
        agent_timeouts: Callable[[], int] | None = None,
    ) -> None:
        opened = open_sources(device, steps=steps, reads_host=header.local_rank == 0)
        unavailable = {**opened.unavailable, **header.unavailable}
        if (why := unavailable.get("communication")) is not None:
            unavailable |= {"communication_share": why, "exposed_communication_share": why}
        if store is None:
            alone = world_size == 1
            unavailable["heartbeat_timeouts"] = (
                "there is one rank, and nobody to look at it" if alone else "the ranks share no store of torch"
            )
        self.header = dataclasses.replace(header, unavailable=unavailable, facts={**header.facts, **opened.facts})
        self._say = say
        self._steps_source = StepSource(writes_at_once=writes_at_once)
        self._writes_source = CheckpointWriteSource(checkpoint_event, steps=steps)
        self._alarms = Alarms(header.host)
        self._listeners: list[Listener] = []
        self._said_problem = False
        self._heartbeat: Heartbeat | None = None
        self._writer = RankWriter(folder, "samples", self.header) if folder is not None else None
        sources: dict[str, Source] = {**opened.sources, "steps": self._steps_source, "checkpoints": self._writes_source}
        if store is not None:
            sources["heartbeats"] = self._heartbeat = Heartbeat(
                store,
                rank=header.rank,
                world_size=world_size,
                host=header.host,
                every_s=settings.heartbeat_s,
                timeout_s=settings.heartbeat_timeout_s,
                say=say,
                silent=self._write_silence,
                steps=steps,
                also=agent_timeouts,
            )
        self._sampler = Sampler(
            sources, [self._write, self._alarm, self._tell], interval_s=settings.interval_s, steps=steps, say=say
        )

    def on_sample(self, listener: Listener) -> None:
        """Call with each sample from now on, in the sampling thread; what it raises is said once."""
        self._listeners = [*self._listeners, listener]

    def take_step(self, record: StepRecord) -> None:
        """A step has ended; costs nothing that is felt."""
        self._steps_source.take(record)

    def take_event(self, event: Event) -> None:
        """A sink of an event stream."""
        self._writes_source.take(event)

    def end_heartbeat(self) -> None:
        """Tell the others that this rank ends in order. Safe to call twice."""
        if self._heartbeat is not None:
            self._heartbeat.close()

    def close(self) -> None:
        """Take the last samples and end all threads. Safe to call twice."""
        self._sampler.close()
        if self._writer is not None:
            self._writer.close()
        self._say_problem()

    def _write(self, sample: Sample) -> None:
        if self._writer is not None:
            self._writer.sample(sample)
        self._say_problem()

    def _write_silence(self, span: Span) -> None:
        if self._writer is not None:
            self._writer.spans(span.step, [span])

    def _alarm(self, sample: Sample) -> None:
        text = self._alarms.take(sample)
        if text is not None and (sample.metric != "communication_share" or self.header.rank == 0):
            self._say(text)

    def _tell(self, sample: Sample) -> None:
        for listener in self._listeners:
            listener(sample)

    def _say_problem(self) -> None:
        problem = "the run's folder cannot be made" if self._writer is None else self._writer.problem
        if problem is not None and not self._said_problem:
            self._said_problem = True
            self._say(f"{problem}; nothing more is written, training goes on")
