"""Who launches the run: we, or torchrun as it comes, or torchrun as fast as its options make it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_PORT = 29400


@dataclass(frozen=True)
class Shape:
    """How many hosts and ranks.

    Attributes:
        num_hosts: At most, and at first.
        ranks_per_host: On each.
        min_hosts: At least.
    """

    num_hosts: int
    ranks_per_host: int
    min_hosts: int = 1

    @property
    def name(self) -> str:
        """As in 2x2."""
        return f"{self.num_hosts}x{self.ranks_per_host}"


SHAPES = {shape.name: shape for shape in (Shape(2, 2), Shape(3, 1), Shape(1, 2))}


@dataclass(frozen=True)
class Arm:
    """A way to launch.

    Attributes:
        name: In tables.
        is_ours: ``hierdist launch``.
        words: Options of torchrun.
        rendezvous: Options of its rendezvous.
        environment: Variables for the agents.
        training: Words for the script: each arm saves where it can go on from.
    """

    name: str
    is_ours: bool = False
    words: tuple[str, ...] = ()
    rendezvous: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    training: tuple[str, ...] = ()

    def command(
        self, host: str, addresses: Mapping[str, str], shape: Shape, folder: Path, script: Sequence[str]
    ) -> list[str]:
        """Of the agent of a host.

        Args:
            host: Its name.
            addresses: Host -> address, in order; the first is where the others meet.
            shape: How many hosts and ranks.
            folder: Of the run.
            script: What the ranks run.
        """
        python = Path(sys.executable)
        hosts, first = f"{shape.min_hosts}:{shape.num_hosts}", next(iter(addresses.values()))
        if self.is_ours:
            standby = ",".join(f"{address}:{_PORT}" for address in list(addresses.values())[:2])
            meeting = ["--rendezvous", standby, "--fence", str(folder / "fence")] if len(addresses) > 1 else []
            return [
                str(python.with_name("hierdist")), "launch", "--hosts", hosts, "--ranks-per-host",
                str(shape.ranks_per_host), *meeting, "--host", host, "--address", addresses[host], "--run", "bench",
                "--record", str(folder / "record"), *self.words, "--", *script, *self.training,
            ]  # fmt: skip
        # It looks for its own host's name in the endpoint, and all hosts here have the same name.
        rendezvous = ",".join([*self.rendezvous, f"is_host={int(addresses[host] == first)}"])
        return [
            str(python), "-m", "torch.distributed.run", "--nnodes", hosts, "--nproc-per-node",
            str(shape.ranks_per_host), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{_PORT}", "--rdzv-id",
            "bench", "--local-addr", addresses[host], "--max-restarts", "1000", "--rdzv-conf", rendezvous, *self.words,
            *script, *self.training,
        ]  # fmt: skip


_OURS = (
    "--replica", "buddy", "--memory-every", "5", "--storage-every", "50", "--elastic",
    '{"mode": "degrade", "max_restarts": 1000, "host_failures": 1000}',
)  # fmt: skip
_THEIRS = ("--storage-every", "5")  # they have storage only; it is a local disk here, which flatters them

ARMS = {
    arm.name: arm
    for arm in (
        Arm("hierdist", is_ours=True, training=_OURS),
        Arm("torchrun", training=_THEIRS),
        Arm(
            "torchrun-fastest",
            words=("--monitor-interval", "0.1"),
            rendezvous=(
                "join_timeout=60", "last_call_timeout=1", "keep_alive_interval=1", "keep_alive_max_attempt=3",
                "read_timeout=10",
            ),
            environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            training=_THEIRS,
        ),
    )
}  # fmt: skip
