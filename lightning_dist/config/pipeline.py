"""Pipeline stages: how many, what they run, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_dist.config.checks import check_choice, check_range
from lightning_dist.errors import CombinationError, ConfigError
from lightning_dist.laws import pipeline_bubble

PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
STAGE_BALANCES = ("parameters", "time")
STAGE_PLACEMENTS = ("auto", "rank_order")
LOSS_REDUCTIONS = ("mean", "sum")

SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv", "dualpipev")  # schedules whose backward comes in two parts
ONE_STAGE = ("gpipe", "1f1b")  # those with one stage a rank
_TWO_STAGES = ("zbv", "dualpipev")
_LISTED = 5  # numbers of micro-batches that an error lists


@dataclass(frozen=True)
class PipelineConfig:
    """Layers dealt to ranks as stages, through which a batch goes in micro-batches.

    Attributes:
        size: Ranks of a pipeline, or, with ``parallel.tensor.size``, groups of so many ranks. ``None`` means those of a
            host (all there are, if hosts have one or differ) with ``parallel.mode=pipeline``, and 1, which makes no
            stages, with the others; ``zero1`` and ``zero2`` take more.
        schedule: In which order a stage works: ``gpipe`` (all forwards, then all backwards), ``1f1b`` (one forward, one
            backward; keeps activations of as many micro-batches as there are stages), ``interleaved_1f1b`` (several
            stages a rank, less idle time, more messages), ``interleaved_zero_bubble`` (also splits backward in two and
            fills idle time with the second part), ``zbv`` (two stages a rank in the shape of a V, nearly no idle time)
            or ``dualpipev``.
        micro_batches: Parts of a batch; ``None``: four a rank. A batch with fewer samples is cut into fewer.
        virtual_stages: Stages a rank; ``None``: 1 for ``gpipe`` and ``1f1b``, 2 for the others.
        layers: Dotted path to the Sequential or ModuleList whose children are the layers, for a module that does not
            say it itself (``pipeline_layers``).
        split: Layers of each stage, e.g. ``[3, 2, 2, 2]``; empty: balanced.
        balance: What is balanced: ``parameters`` (those that are multiplied; embeddings count nothing) or ``time``,
            measured once on the module's ``example_input_array``.
        placement: Which rank has which stage: ``auto`` (inside a host if a pipeline fits, else with as few neighbours
            on different hosts as possible) or ``rank_order`` (as ranks are numbered).
        loss_reduction: What ``training_step`` returns: ``mean`` over the samples it is given, or ``sum``.
    """

    size: int | None = None
    schedule: str = "1f1b"
    micro_batches: int | None = None
    virtual_stages: int | None = None
    layers: str | None = None
    split: list[int] = field(default_factory=list)
    balance: str = "parameters"
    placement: str = "auto"
    loss_reduction: str = "mean"

    def __post_init__(self) -> None:
        check_choice("parallel.pipeline.schedule", self.schedule, PIPELINE_SCHEDULES)
        check_choice("parallel.pipeline.balance", self.balance, STAGE_BALANCES)
        check_choice("parallel.pipeline.placement", self.placement, STAGE_PLACEMENTS)
        check_choice("parallel.pipeline.loss_reduction", self.loss_reduction, LOSS_REDUCTIONS)
        for name, unit in (("size", "ranks"), ("micro_batches", "micro-batches"), ("virtual_stages", "stages")):
            given = getattr(self, name)
            if given is not None:
                check_range(f"parallel.pipeline.{name}", given, low=1, unit=unit)
                if given != int(given):
                    raise ConfigError(f"parallel.pipeline.{name}={given:g} {unit}: must be a whole number")
        if any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in self.split):
            raise ConfigError(
                f"parallel.pipeline.split={list(self.split)}: must list the layers of each stage, at least one, "
                "e.g. [3, 2, 2]"
            )
        self._check_stages()
        if self.size is not None and self.size > 1:
            self.check_size(self.size)

    @property
    def stages_per_rank(self) -> int:
        """Stages each rank has."""
        if self.virtual_stages is not None:
            return self.virtual_stages
        return 1 if self.schedule in ONE_STAGE else 2

    def micro_batches_for(self, size: int) -> int:
        """Micro-batches of a full batch, for a pipeline of ``size`` ranks."""
        return self.micro_batches if self.micro_batches is not None else 4 * size

    def check_size(self, size: int) -> None:
        """Refuse what does not work with a pipeline of ``size`` ranks.

        Raises:
            CombinationError: The schedule does not take the number of micro-batches; the message says how long ranks
                would idle, and which numbers work.
            ConfigError: ``split`` is for another number of stages.
        """
        stages = size * self.stages_per_rank
        if self.split and len(self.split) != stages:
            raise ConfigError(
                f"parallel.pipeline.split={list(self.split)} has {len(self.split)} stages, and there are {stages}: "
                f"{size} ranks with {self.stages_per_rank} each"
            )
        count = self.micro_batches_for(size)
        if takes(self.schedule, size, count):
            return
        working = [n for n in range(1, 16 * size + 1) if takes(self.schedule, size, n)]
        near = sorted(sorted(working, key=lambda n: abs(n - count))[:_LISTED])
        listed = ", ".join(f"{n} (idle {self._idle(size, n):.0%})" for n in near)
        raise CombinationError(
            f"parallel.pipeline.micro_batches={count} does not work with parallel.pipeline.schedule={self.schedule} on "
            f"{size} ranks, which would idle for {self._idle(size, count):.0%} of a step; "
            f"{_rule(self.schedule, size)}. Write one of {listed}, or "
            "parallel.pipeline.schedule=gpipe, which takes any number"
        )

    def _idle(self, size: int, count: int) -> float:
        return pipeline_bubble(size, count, virtual_stages=self.stages_per_rank)

    def _check_stages(self) -> None:
        """Refuse a number of stages a rank that the schedule does not take."""
        count, schedule = self.stages_per_rank, self.schedule
        if schedule in ONE_STAGE and count != 1:
            raise CombinationError(
                f"parallel.pipeline.virtual_stages={count} does not work with parallel.pipeline.schedule={schedule}, "
                "which has one stage a rank; write parallel.pipeline.schedule=interleaved_1f1b"
            )
        if schedule in _TWO_STAGES and count != 2:
            raise CombinationError(
                f"parallel.pipeline.virtual_stages={count} does not work with parallel.pipeline.schedule={schedule}, "
                "which has two stages a rank; write 2, or parallel.pipeline.schedule=interleaved_zero_bubble"
            )


def takes(schedule: str, size: int, micro_batches: int) -> bool:
    """Whether a schedule works with so many micro-batches on ``size`` ranks."""
    if schedule == "1f1b":
        return micro_batches >= size
    if schedule.startswith("interleaved"):
        return micro_batches % max(1, micro_batches // size) == 0
    if schedule == "dualpipev":
        return micro_batches >= 2 * size
    return micro_batches >= 1


def for_batch(schedule: str, size: int, micro_batches: int, samples: int) -> tuple[str, int]:
    """The schedule and the number of micro-batches for a batch of ``samples``, perhaps smaller than the others.

    What the schedule cannot run goes by one that has the same stages on the same ranks and takes any number, so that
    results do not change.
    """
    for count in range(min(micro_batches, samples), 0, -1):
        if takes(schedule, size, count):
            return schedule, count
    return ("zbv" if schedule in _TWO_STAGES else "gpipe"), max(1, min(micro_batches, samples))


def position_of_stage(schedule: str, size: int, stages: int) -> tuple[int, ...]:
    """Which of a pipeline's ranks has each stage: dealt in turn, or down and up again in the shape of a V."""
    if schedule in _TWO_STAGES:
        return tuple(stage if stage < size else stages - 1 - stage for stage in range(stages))
    return tuple(stage % size for stage in range(stages))


def stages_of_position(positions: Sequence[int], position: int) -> tuple[int, ...]:
    """The stages of one of a pipeline's ranks."""
    return tuple(stage for stage, holder in enumerate(positions) if holder == position)


def _rule(schedule: str, size: int) -> str:
    if schedule == "1f1b":
        return f"it needs at least {size}, one a rank"
    if schedule == "dualpipev":
        return f"it needs at least {2 * size}, one a stage"
    return f"they must make equal rounds of about {size}"
