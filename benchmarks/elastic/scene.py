"""Hosts on which a run is launched, by us or by torchrun, and in which it is hurt."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from benchmarks.elastic.arms import Arm, Shape
from benchmarks.elastic.steps import Line, LineReader, newest_round, recovery
from tests.support.cluster import NamespaceCluster
from tests.support.failures import RanksFailed
from tests.support.fresh import FreshRanks

TRAINING = Path(__file__).with_name("training.py")
_LOOK_S = 0.1


class NeverHappened(RuntimeError):
    """Something was waited for in vain."""


@dataclass(frozen=True)
class Training:
    """What the script is told.

    Attributes:
        steps: Optimizer steps.
        options: Further words.
    """

    steps: int
    options: tuple[str, ...] = ()


class Scene:
    """A run on hosts of its own, in a ``with`` statement.

    Args:
        arm: Who launches it.
        shape: How many hosts and ranks.
        folder: Of the run; all hosts share it.
        training: What the script is told.
        rate_mbit: Of each host's link.
        before: Host -> words before the command that launches.
    """

    def __init__(
        self,
        arm: Arm,
        shape: Shape,
        folder: Path,
        training: Training,
        *,
        rate_mbit: float | None = None,
        before: Callable[[str], Sequence[str]] = lambda host: (),
    ) -> None:
        self.arm, self.shape, self.folder = arm, shape, folder
        self._reader = LineReader(folder)
        self._training = training
        self._rate_mbit = rate_mbit
        self._before = before
        self._stack = ExitStack()
        self._agents: dict[str, FreshRanks] = {}

    def __enter__(self) -> Scene:
        self.cluster = self._stack.enter_context(NamespaceCluster(self.shape.num_hosts, rate_mbit=self._rate_mbit))
        self.folder.mkdir(parents=True)
        for host in self.cluster.hosts:
            self.start(host)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def start(self, host: str) -> None:
        """Launch the run on a host, for the first time or again."""
        if host in self._agents:
            self._agents.pop(host).close()
        addresses = {name: each.address for name, each in self.cluster.hosts.items()}
        script = [str(TRAINING), "--folder", str(self.folder), "--steps", str(self._training.steps)]
        command = self.arm.command(host, addresses, self.shape, self.folder, [*script, *self._training.options])
        environment = {
            **self.arm.environment, "OMP_NUM_THREADS": "1", "HIERDIST_SECRET": "benchmark" * 4,
            "PYTHONPATH": str(TRAINING.parents[2]), "HIERDIST_HOST": host,
        }  # fmt: skip
        self._agents[host] = self.cluster.start_on_hosts(
            [*self._before(host), *command], hosts=[host], env=environment, cwd=self.folder
        )  # fmt: skip

    def lines(self) -> list[Line]:
        """Of all ranks so far."""
        return self._reader.read()

    def wait_for(self, what: str, look: Callable[[list[Line]], bool], *, deadline_s: float) -> None:
        """Until the lines are so.

        Raises:
            NeverHappened: They were not by the deadline; with what the hosts printed last.
        """
        end = time.monotonic() + deadline_s
        while not look(self.lines()):
            if time.monotonic() > end:
                raise NeverHappened(f"{what} did not happen within {deadline_s:g} s\n{self.last_words()}")
            time.sleep(_LOOK_S)

    def steps_after(self, round_before: int, steps: int, *, world: int | None = None, deadline_s: float) -> int:
        """Wait until all ranks of a later round have done so many steps in it; the round.

        Args:
            round_before: See above.
            steps: See above.
            world: It has so many ranks; ``None``: any number.
            deadline_s: How long it may take.

        Raises:
            NeverHappened: It took longer.
        """

        def has_trained(lines: list[Line]) -> bool:
            newest = newest_round(lines)
            mine = [line for line in lines if line.round == newest]
            if newest <= round_before or (world is not None and mine[0].world != world):
                return False
            return len({line.rank for line in mine}) == mine[0].world and len({line.step for line in mine}) >= steps

        size = "" if world is None else f" with {world} ranks"
        self.wait_for(f"{steps} steps{size}", has_trained, deadline_s=deadline_s)
        return newest_round(self.lines())

    def wait(self, *, deadline_s: float) -> dict[str, int]:
        """Until all agents have ended; host -> exit code.

        Raises:
            NeverHappened: They have not by the deadline.
        """
        end = time.monotonic() + deadline_s
        try:
            return {
                host: agent.wait(deadline_s=max(0.0, end - time.monotonic()))[0].returncode
                for host, agent in self._agents.items()
            }
        except RanksFailed as failure:
            raise NeverHappened(f"the run did not end within {deadline_s:g} s\n{failure}") from failure

    def processor_s(self) -> float:
        """Processor time that all processes on the hosts have used so far, in seconds."""
        total = 0.0
        for pid in (pid for host in self.cluster.hosts.values() for pid in host.pids()):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = psutil.Process(pid).cpu_times()
                total += times.user + times.system
        return total

    def kill_rank(self, number: int) -> float:
        """SIGKILL for one of the processes that train, by their order; when that was."""
        newest = newest_round(self.lines())
        pids = sorted(
            int(path.stem.rpartition("-")[2])
            for path in (self.folder / "steps").glob("*.jsonl")
            if any(f'"round": {newest},' in text for text in path.read_text().splitlines()[-1:])
        )
        living = [pid for pid in pids if psutil.pid_exists(pid)]
        now_s = time.monotonic()
        os.kill(living[number % len(living)], signal.SIGKILL)
        return now_s

    def kill_host(self, host: str) -> float:
        """SIGKILL for all that runs on a host: its connections are closed by the kernel; when that was."""
        now_s = time.monotonic()
        for pid in self.cluster[host].pids():
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
        return now_s

    def lose_host(self, host: str) -> float:
        """A host falls silent, as when its power fails, and nothing is told to the others; when that was."""
        now_s = time.monotonic()
        self.cluster[host].set_link(up=False)
        self.kill_host(host)
        return now_s

    def bring_back(self, host: str) -> None:
        """Start a host again that was killed or lost."""
        self.cluster[host].set_link(up=True)
        self.start(host)

    def result(self) -> Path:
        """What rank 0 writes at the end."""
        return self.folder / "result.json"

    def words(self, most: int = 0) -> str:
        """What the hosts printed, or so many last characters of each."""
        return "\n".join(f"--- {host}\n{agent.output(0)[-most:]}" for host, agent in self._agents.items())

    def last_words(self) -> str:
        """What the hosts printed last."""
        return self.words(3000)

    def recovered(self, *, fault_s: float, round_before: int, deadline_s: float) -> None:
        """Until all ranks of a later round have done a step."""
        self.wait_for(
            "a step after the fault",
            lambda lines: recovery(lines, fault_s=fault_s, round_before=round_before) is not None,
            deadline_s=deadline_s,
        )
