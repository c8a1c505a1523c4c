"""What a pipeline says in a fit: where its stages are, what crosses their boundaries, how long ranks idled."""

from __future__ import annotations

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_dist import build
from lightning_dist.config.pipeline import stages_of_position
from lightning_dist.modes.mode import Setting
from lightning_dist.parallel.pipeline import StagedModel, StageLinks
from lightning_dist.parallel.pipeline.report import BATCH, PipelineReport, make_report, own_batches


class StageReports:
    """Of one fit, or of another call of the Trainer; every rank makes it.

    Args:
        setting: What the mode works in.
        staged: The model.
        links: Its groups.
    """

    def __init__(self, setting: Setting, staged: StagedModel, links: StageLinks) -> None:
        self._setting = setting
        self._staged = staged
        self._links = links
        self._full_cut: tuple[str, int] | None = None  # schedule and micro-batches of the first batch
        self.is_begun = False  # whether a batch has been trained on

    def say_placement(self) -> None:
        """Say where stages are, and warn if more boundaries than needed lie between hosts."""
        run, parallel = self._setting.run, self._setting.parallel
        self._setting.announce(build.describe_stages(run, self._staged, self._links, parallel))
        needless = build.needless_crossings(run, self._staged, self._links, parallel)
        if needless is not None:
            rank_zero_warn(needless)

    def begin_batch(self, cut: tuple[str, int], samples: int) -> None:
        """A batch comes; warn if the first one has too few samples.

        Args:
            cut: Schedule and number of micro-batches.
            samples: Of the batch.
        """
        if self._full_cut is not None:
            return
        self._full_cut = cut
        config = self._setting.parallel.pipeline
        wanted = config.micro_batches_for(self._links.pipeline.size)
        if cut != (config.schedule, wanted) and config.micro_batches is not None:
            rank_zero_warn(
                f"a batch of {samples} samples goes through the pipeline in {cut[1]} micro-batches by {cut[0]}, "
                f"not in {wanted} by {config.schedule}: it has too few samples. Results are the same; ranks idle "
                "longer. Write a larger batch size, or fewer parallel.pipeline.micro_batches"
            )

    def end_batch(self, cut: tuple[str, int], start_ns: int) -> None:
        """Record it, and after the first one say what has crossed the boundaries; collective over the pipeline."""
        run, (schedule, count) = self._setting.run, cut
        run.events.span(BATCH, start_ns, schedule=schedule, micro_batches=count, full=cut == self._full_cut)
        if not self.is_begun:
            self.is_begun = True
            self._setting.announce(build.describe_boundaries(run, self._staged, self._links))

    def report(self) -> PipelineReport | None:
        """How this rank's pipeline has worked; ``None`` before its first batch. Collective over the pipeline."""
        if self._full_cut is None:
            return None
        staged, pipeline = self._staged, self._links.pipeline
        schedule, count = self._full_cut
        positions = staged.cut.positions
        return make_report(
            staged.gather.exchange(own_batches(self._setting.run.events.snapshot())),
            schedule=schedule,
            orders=staged.runner.orders(schedule, count),
            stages=[stages_of_position(positions, position) for position in range(pipeline.size)],
            ranks=pipeline.ranks,
            micro_batches=count,
        )
