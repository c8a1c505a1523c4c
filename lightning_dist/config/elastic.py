"""What becomes of a run when a rank or a host fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_dist.config.checks import check_choice, check_count, check_flags, check_range

BATCHES = ("keep", "per_rank")
RATES = ("linear", "sqrt", "none")


@dataclass(frozen=True)
class ElasticConfig:
    """What becomes of a run when a rank or a host fails; it acts under ``hierdist launch``.

    Attributes:
        mode: ``off`` (the run ends), ``restart`` (all ranks are started again once all hosts are there) or ``degrade``
            (the run goes on with the hosts that are left, and takes a host back when it returns).
        batch: What becomes of the global batch at another number of ranks: it stays, by accumulation (``keep``), or
            each rank goes on with its own (``per_rank``).
        rate: With ``per_rank``: how the learning rate follows the global batch.
        max_restarts: Within ``window_s``; one more ends the run.
        window_s: Seconds in which restarts are counted.
        host_failures: A host that failed so many times within ``window_s`` is set aside.
        rejoin_s: How long to wait for a lost host before going on without it, in seconds; with ``restart``, before the
            run ends.
        regrow: Take a host that is back at the next snapshot.
        in_place: Beside a rank that failed, the others run the script again in the processes that they have; with
            ``parallel=ddp`` and ``zero1`` to ``zero3`` on CPU. The script must bear to be run twice in a process.
        start_s: From a rank's start to its first step, at most, in seconds; loading counts.
        hang_floor_s: A rank without progress is never taken for hung before, in seconds.
        hang_factor: A step may take so many times as long as the slowest of the last ones.
        stopped_s: A process that is stopped (SIGSTOP) is taken for hung after so long, whatever it does, in seconds.
        save_s: A save may hold training for so long, in seconds.
        validation_s: A validation step, or what else runs between two training steps, may take so long, in seconds.
        slow_factor: A host whose own work takes so many times as long as the others' is reported as slow.
    """

    MODES: ClassVar[tuple[str, ...]] = ("off", "restart", "degrade")

    mode: str = "off"
    batch: str = "keep"
    rate: str = "linear"
    max_restarts: int = 20
    window_s: float = 3600.0
    host_failures: int = 3
    rejoin_s: float = 0.0
    regrow: bool = True
    in_place: bool = False
    start_s: float = 600.0
    hang_floor_s: float = 30.0
    hang_factor: float = 10.0
    stopped_s: float = 10.0
    save_s: float = 600.0
    validation_s: float = 600.0
    slow_factor: float = 2.0

    def __post_init__(self) -> None:
        check_flags("elastic", self)
        check_choice("elastic.mode", self.mode, self.MODES)
        check_choice("elastic.batch", self.batch, BATCHES)
        check_choice("elastic.rate", self.rate, RATES)
        check_count("elastic.max_restarts", self.max_restarts, low=0, unit="restarts")
        check_count("elastic.host_failures", self.host_failures, low=1, unit="failures")
        check_range("elastic.window_s", self.window_s, low=1, unit="seconds")
        check_range("elastic.rejoin_s", self.rejoin_s, low=0, unit="seconds")
        for name in ("start_s", "hang_floor_s", "stopped_s", "save_s", "validation_s"):
            check_range(f"elastic.{name}", getattr(self, name), low=0.5, unit="seconds")
        check_range("elastic.hang_factor", self.hang_factor, low=2, unit="times")
        check_range("elastic.slow_factor", self.slow_factor, low=1.1, unit="times")


ELASTIC_PRESETS: dict[str, ElasticConfig] = {name: ElasticConfig(mode=name) for name in ElasticConfig.MODES}
