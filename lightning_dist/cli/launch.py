"""``hierdist launch``: the agent of this host: it runs a script on its ranks, and again after a failure."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from lightning_dist.cli.command import Command
from lightning_dist.config.elastic import ElasticConfig
from lightning_dist.elastic.agent.command import other_python, parse_command
from lightning_dist.elastic.agent.environment import HOST_VARIABLE
from lightning_dist.elastic.agent.options import LaunchOptions, parse_hosts
from lightning_dist.elastic.agent.running import run_host
from lightning_dist.elastic.health.checkup import checkup
from lightning_dist.elastic.health.kept import figures_file
from lightning_dist.elastic.launched import RUN_VARIABLE
from lightning_dist.elastic.leading import open_session
from lightning_dist.elastic.leading.endpoints import Endpoint, own_index, parse
from lightning_dist.elastic.leading.secret import FILE_VARIABLE, VARIABLE, read_secret
from lightning_dist.elastic.session import Session
from lightning_dist.errors import ConfigError, LaunchError
from lightning_dist.topology.addresses import interface_of, own_address

_LOOPBACK = "127.0.0.1"
_HEALTH = "health"  # folder beside the incidents


def _add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hosts", default="1", metavar="MIN:MAX", help="how many hosts take part, e.g. 2:4 or 2 (default: 1)"
    )
    parser.add_argument(
        "--ranks-per-host", type=int, metavar="N", help="ranks on this host (default: one a GPU, or one)"
    )
    parser.add_argument(
        "--rendezvous",
        metavar="HOST:PORT,...",
        help="where the leader listens, and who takes over when it is lost, in this order; the same on all hosts",
    )
    parser.add_argument(
        "--elastic",
        choices=ElasticConfig.MODES,
        help="what becomes of failures, whatever the script says (default: what it says, else degrade, or restart if "
        "MIN and MAX are the same)",
    )
    parser.add_argument("--run", metavar="NAME", help="name of the run (default: made by the first leader)")
    parser.add_argument("--record", metavar="FOLDER", help="where incidents.jsonl is written")
    parser.add_argument(
        "--fence", metavar="FOLDER", help="on storage that all hosts share: rules out two halves of a cut network"
    )
    parser.add_argument("--host", metavar="NAME", help=f"this host's name (default: {HOST_VARIABLE}, or its hostname)")
    parser.add_argument("--address", metavar="ADDRESS", help="this host's address for the others (default: found out)")
    parser.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this once, before ranks are started; may be given several times",
    )
    parser.add_argument("--logs", metavar="FOLDER", help="keep what each rank prints in a file of each round")
    parser.add_argument("--no-prefix", action="store_true", help="print lines without [host:rank] before them")
    parser.add_argument("--no-health-check", action="store_true", help="do not check this host before it joins")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what each rank runs")


def _run_launch(arguments: argparse.Namespace) -> int:
    environ = dict(os.environ)
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    program = parse_command(words)
    warning = other_python(program)
    if warning is not None:
        print(f"hierdist launch: {warning}", file=sys.stderr)
    min_hosts, max_hosts = parse_hosts(arguments.hosts)
    endpoints = parse(arguments.rendezvous) if arguments.rendezvous else ()
    if max_hosts > 1 and not endpoints:
        raise ConfigError(
            f"--hosts {arguments.hosts} needs --rendezvous HOST:PORT, the same on all hosts, e.g. --rendezvous a:29400"
        )
    address = arguments.address or _address(endpoints, environ)
    record = _record(arguments.record)
    options = LaunchOptions(
        program=program,
        num_ranks=_num_ranks(arguments.ranks_per_host),
        min_hosts=min_hosts,
        max_hosts=max_hosts,
        host=arguments.host or environ.get(HOST_VARIABLE) or socket.gethostname(),
        address=address,
        mode=arguments.elastic,
        preload=tuple(arguments.preload),
        logs=None if arguments.logs is None else Path(arguments.logs).absolute(),
        with_prefix=not arguments.no_prefix,
        record=record,
    )
    secret = read_secret(environ)

    def session(say: Callable[[str], None]) -> Session:
        return open_session(
            host=options.host,
            address=address,
            endpoints=endpoints,
            secret=secret,
            options=options.elastic(),
            min_hosts=min_hosts,
            max_hosts=max_hosts,
            run=arguments.run or environ.get(RUN_VARIABLE),
            fence=None if arguments.fence is None else Path(arguments.fence).absolute(),
            record=record,
            say=say,
        )

    for name in (VARIABLE, FILE_VARIABLE):
        environ.pop(name, None)  # it is the agents'
    interface = interface_of(address) if endpoints else None
    if interface is not None:
        # Gloo's own choice is the address of the host's name, which on many systems is a loopback one.
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    check = None if arguments.no_health_check or not endpoints else _health_check(options, endpoints, secret)
    return run_host(options, open_session=session, environ=environ, check=check, may_fork=True)


def _health_check(
    options: LaunchOptions, endpoints: tuple[Endpoint, ...], secret: bytes | None
) -> Callable[[], str | None]:
    """Checks this host beside what it, and the others of the run, have shown in the folder of ``--record``."""
    folders = [folder for folder in (options.record, options.logs) if folder is not None]
    own = own_index(endpoints, host=options.host, address=options.address)
    others = [(endpoint.host, endpoint.port) for index, endpoint in enumerate(endpoints) if index != own]
    history = None if options.record is None else figures_file(options.record / _HEALTH, options.host)

    def check() -> str | None:
        health = checkup(folders=[*folders, Path.cwd()], endpoints=others, secret=secret, history=history)
        return None if health.is_fit else str(health)

    return check


def _record(given: str | None) -> Path | None:
    if given is None:
        return None
    folder = Path(given).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--record {folder} cannot be made: {error.strerror}; name another folder") from error
    return folder


def _num_ranks(given: int | None) -> int:
    if given is None:
        return max(torch.cuda.device_count(), 1)
    if given < 1:
        raise ConfigError(f"--ranks-per-host must be at least 1, got {given}")
    return given


def _address(endpoints: tuple[Endpoint, ...], environ: Mapping[str, str]) -> str:
    """Loopback for a host alone, else what the others reach: the interface of the ranks, or the way to the leader."""
    if not endpoints:
        return _LOOPBACK
    return own_address({**environ, "MASTER_ADDR": endpoints[0].host})


LAUNCH = Command(
    summary="Run a script on all ranks, and again after a failure",
    add_arguments=_add_launch_arguments,
    run=_run_launch,
)
