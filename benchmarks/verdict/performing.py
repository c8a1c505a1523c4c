"""Cases performed on hosts: each as one recorded run, then briefly without each of its causes."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.verdict.runs import Case, Link, Run
from benchmarks.verdict.store import write_samples
from benchmarks.verdict.training import WARMUP, Timed, train
from tests.support.cluster import NamespaceCluster
from tests.support.forkserver import PRELOADED, ForkServer
from tests.support.ranks import RankPool, RanksFailed

_DEADLINE_S = 60.0  # of a run; most take two to four seconds
_COMPARED_STEPS = 12  # of a run without a cause


@dataclass(frozen=True)
class Performed:
    """What a case has cost.

    Attributes:
        seed: The case's.
        causes: Names of what was put in.
        run: Its options.
        slow_rank: See :class:`~benchmarks.verdict.runs.Run`.
        step_s: Mean step, by the ranks' own clocks.
        compute_s: Of it, sleep for compute, on the median rank.
        without_s: Cause -> mean step of the same run without it.
        retransmits: Segments that the hosts have sent again.
        took_s: All of it, in seconds.
        failure: Why it could not be performed; then nothing else is known.
    """

    seed: int
    causes: tuple[str, ...]
    run: Mapping[str, Any]
    step_s: float = 0.0
    compute_s: float = 0.0
    without_s: Mapping[str, float | None] | None = None
    retransmits: int = 0
    took_s: float = 0.0
    failure: str | None = None


class Hosts:
    """Two hosts and four ranks that stay, and perform case after case.

    Args:
        server: Where ranks come from; without one it starts its own.
    """

    def __init__(self, server: ForkServer | None = None) -> None:
        self._server = server
        self._stack = ExitStack()
        self._cluster: NamespaceCluster
        self._pool: RankPool
        self._scratch: Path

    def __enter__(self) -> Hosts:
        server = self._server or ForkServer([*PRELOADED, "benchmarks.verdict.training"])
        if self._server is None:
            self._stack.enter_context(server)
        self._scratch = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="hierdist-bench-")))
        self._cluster = self._stack.enter_context(NamespaceCluster(2))
        self._pool = self._stack.enter_context(self._cluster.pool({"a": [0, 1], "b": [2, 3]}, server=server))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def perform(self, case: Case, record: Path) -> Performed:
        """Run a case.

        Args:
            case: What to run.
            record: Where its monitor writes; what is there is removed.
        """
        started_s = time.monotonic()
        known = {"seed": case.seed, "causes": tuple(cause.value for cause in case.causes), "run": asdict(case.run)}
        shutil.rmtree(record, ignore_errors=True)
        record.mkdir(parents=True)
        sent_again = self._retransmits()
        try:
            timed = self._run(case.run, record)
            sent_again = self._retransmits() - sent_again
            without = {cause.value: self._compared(run) for cause, run in case.without.items()}
        except RanksFailed as error:
            shutil.rmtree(record, ignore_errors=True)
            return Performed(**known, failure=str(error), took_s=time.monotonic() - started_s)
        return Performed(
            **known,
            step_s=max(each.step_s for each in timed),
            compute_s=sorted(each.compute_s for each in timed)[len(timed) // 2 - 1],
            without_s=without,
            retransmits=sent_again,
            took_s=time.monotonic() - started_s,
        )

    def _compared(self, run: Run | None) -> float | None:
        if run is None:
            return None
        steps = WARMUP + max(_COMPARED_STEPS, 2 * run.save_every)  # whole periods of what is rare
        return max(each.step_s for each in self._run(replace(run, steps=steps), None))

    def _run(self, run: Run, record: Path | None) -> list[Timed]:
        for name, host in self._cluster.hosts.items():
            link = run.links.get(name, Link())
            host.set_rate(link.rate_mbit, queue_bytes=link.queue_bytes)
        samples = self._scratch / f"samples-{run.sample_bytes}"
        if not samples.exists():
            write_samples(samples, run.sample_bytes)
        with tempfile.TemporaryDirectory(prefix="run-", dir=self._scratch) as scratch:
            return self._pool.run(
                train,
                layout=run.placement,
                args=(run, samples, Path(scratch), record),
                deadline_s=_DEADLINE_S,
                seed=run.seed,
            )

    def _retransmits(self) -> int:
        return sum(host.retransmits() for host in self._cluster.hosts.values())
