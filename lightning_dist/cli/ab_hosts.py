"""``hierdist ab --hosts``: where the hosts of an experiment meet, and what those do that do not lead."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lightning_dist.elastic.agent.environment import HOST_VARIABLE
from lightning_dist.elastic.leading.endpoints import Endpoint, listen, own_index, parse
from lightning_dist.elastic.leading.secret import read_secret, required
from lightning_dist.errors import ConfigError
from lightning_dist.experiment.arms import Experiment, RunName, said
from lightning_dist.experiment.hosts import FirstHost, OtherHost, connected
from lightning_dist.experiment.performing import OnEnd, follow
from lightning_dist.topology.addresses import own_address

JOIN_S = 600.0
"""How long the others wait for the first host."""


@dataclass(frozen=True)
class Meeting:
    """Where several hosts meet.

    Attributes:
        endpoint: Of the first host.
        host: Name of this one.
        address: Its own.
        leads: Whether it is the first.
        num_hosts: How many there are.
        secret: What all must know.
    """

    endpoint: Endpoint
    host: str
    address: str
    leads: bool
    num_hosts: int
    secret: bytes

    @contextmanager
    def first_host(self, experiment: Experiment, say: Callable[[str], None]) -> Iterator[FirstHost]:
        """Wait for the others, and lead them.

        Raises:
            LaunchError: The port is taken.
        """
        listener = listen(self.endpoint, self.address)
        with FirstHost(listener, num_hosts=self.num_hosts, secret=self.secret, experiment=experiment, say=say) as first:
            say(f"waiting for {self.num_hosts - 1} more to give the same command")
            first.gather()
            yield first


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--hosts`` and ``--rendezvous``."""
    parser.add_argument(
        "--hosts", type=int, default=1, metavar="N", help="give the same command on each of N hosts (default: 1)"
    )
    parser.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="where the first of them listens; another port than that of a hierdist launch in the command",
    )


def meeting(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Meeting | None:
    """What the options say; ``None``: this host is alone, or the command starts the others.

    Raises:
        ConfigError: One option lacks another, or there is no secret.
    """
    if arguments.hosts < 1:
        raise ConfigError(f"--hosts must be at least 1, got {arguments.hosts}")
    if arguments.hosts == 1:
        if arguments.rendezvous is not None:
            raise ConfigError("--rendezvous is where several hosts meet; write --hosts 2 with it")
        return None
    if arguments.rendezvous is None:
        raise ConfigError(
            f"--hosts {arguments.hosts} needs --rendezvous HOST:PORT, the same on all hosts, e.g. --rendezvous a:29300"
        )
    endpoints = parse(arguments.rendezvous)
    if len(endpoints) > 1:
        raise ConfigError(f"--rendezvous {arguments.rendezvous} names several hosts; write the first one only")
    host = environ.get(HOST_VARIABLE) or socket.gethostname()
    address = own_address({**environ, "MASTER_ADDR": endpoints[0].host})
    leads = own_index(endpoints, host=host, address=address) is not None
    return Meeting(endpoints[0], host, address, leads, arguments.hosts, required(read_secret(environ)))


def run_other_host(
    where: Meeting, experiment: Experiment, folder: Path, *, limit_s: float | None, console: Console, on_end: OnEnd
) -> int:
    """Run what the first host says; the status that it ends with.

    Raises:
        ConfigError: The first host was asked something else.
        LaunchError: It cannot be reached, or has ended.
        RecordError: The folder cannot be written.
    """

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    def on_start(name: RunName) -> None:
        console.print(f"{name} ({said(experiment.overrides(name.arm))}) ...", end=" ", highlight=False, markup=False)

    host = f"{where.host}-{where.address}"  # hosts on one machine share its name
    connection = connected(where.endpoint.host, where.endpoint.port, wait_s=JOIN_S, say=say)
    with OtherHost(connection, secret=where.secret, host=host, experiment=experiment) as first:
        say(f"the first host, {where.endpoint}, says what is run")
        verdict, status = follow(
            experiment, first, folder, host=host, environ=os.environ, limit_s=limit_s, on_start=on_start, on_end=on_end
        )
    say(verdict)
    return status
