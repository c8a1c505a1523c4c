"""``hierdist chaos``: launch a run, hit it with faults at given ranks and steps, and say what became of it."""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_dist.build.injections import KeptCheckpoints
from lightning_dist.cli.command import Command
from lightning_dist.config.checks import check_local
from lightning_dist.elastic.agent.environment import HOST_VARIABLE
from lightning_dist.elastic.chaos.command import LaunchedCommand
from lightning_dist.elastic.chaos.conductor import Conductor, Ending
from lightning_dist.elastic.chaos.folder import RECORD, VARIABLE, ChaosFolder
from lightning_dist.elastic.chaos.kinds import KINDS, REQUIRED
from lightning_dist.elastic.chaos.plan import Plan, read_plan
from lightning_dist.elastic.chaos.random_plans import random_plan
from lightning_dist.errors import ConfigError

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plan", type=Path, metavar="FILE", help="YAML with the faults; see --kinds-help")
    parser.add_argument("--seed", type=int, metavar="N", help="draw a plan: the same numbers give the same plan")
    parser.add_argument("--faults", type=int, default=5, metavar="N", help="with --seed: how many (default: 5)")
    parser.add_argument("--ranks", type=int, metavar="N", help="with --seed: of the run")
    parser.add_argument("--steps", type=int, metavar="N", help="with --seed: optimizer steps of the run")
    parser.add_argument("--kinds", metavar="A,B", help="with --seed: only these kinds (default: all that are possible)")
    parser.add_argument("--interface", metavar="NAME", help="with --seed: the link to cut and slow, e.g. eth0")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FOLDER",
        help="where ranks and hosts tell each other what is due, and what has happened is written; the same, shared "
        "one on all hosts (default: chaos/ and the time)",
    )
    parser.add_argument(
        "--host",
        metavar="NAME",
        help="this host's name, in the plan and for the command (default: HIERDIST_HOST, or its hostname)",
    )
    parser.add_argument("--print", action="store_true", dest="prints", help="print the plan, and launch nothing")
    parser.add_argument("--kinds-help", action="store_true", help="print what each kind does and its options")
    parser.add_argument("launch", nargs=argparse.REMAINDER, metavar="-- command", help="e.g. -- hierdist launch ...")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.kinds_help:
        print(_kinds_in_words())
        return 0
    plan = _plan(arguments)
    if arguments.prints:
        print(plan.to_yaml(), end="")
        return 0
    command = arguments.launch[1:] if arguments.launch[:1] == ["--"] else arguments.launch
    if not command:
        raise ConfigError("there is no command to launch; write it after --: hierdist chaos ... -- hierdist launch ...")
    if VARIABLE in os.environ:
        raise ConfigError("this is launched by hierdist chaos already; run it once, around the whole command")
    check_local("--record", arguments.record)
    path = arguments.record or Path("chaos") / datetime.datetime.now().astimezone().strftime("%Y-%m-%d_%H-%M-%S")
    host = arguments.host or os.environ.get(HOST_VARIABLE) or socket.gethostname()
    folder = ChaosFolder(path.absolute())
    environ = os.environ if arguments.host is None else {**os.environ, HOST_VARIABLE: host}
    launched = LaunchedCommand(command, folder=str(folder.path), host=host, environ=environ)
    folder.make(plan)
    before = sum(folder.is_claimed(number) for number in range(len(plan.faults)))
    if before:
        _say(f"{before} of the plan's faults have happened already, as {folder.path} says, and do not happen again")
    conductor = Conductor(folder, launched, host=host, kept=KeptCheckpoints(), say=_say)
    with _passing_on(conductor):
        ending = conductor.run()
    return _tell(ending, path)


def _plan(arguments: argparse.Namespace) -> Plan:
    if (arguments.plan is None) == (arguments.seed is None):
        raise ConfigError("give either --plan FILE or --seed N: the faults are written down, or drawn")
    if arguments.plan is not None:
        return read_plan(arguments.plan)
    for name in ("ranks", "steps"):
        if getattr(arguments, name) is None:
            raise ConfigError(f"--seed needs --{name}, the number of {name} of the run")
    return random_plan(
        arguments.seed,
        num_faults=arguments.faults,
        num_ranks=arguments.ranks,
        num_steps=arguments.steps,
        kinds=[kind for kind in (arguments.kinds or "").split(",") if kind],
        interface=arguments.interface,
    )


@contextmanager
def _passing_on(conductor: Conductor) -> Iterator[None]:
    """What this process is told to do, the command is told; this one ends after it."""

    def pass_on(number: int, frame: Any) -> None:
        del frame
        conductor.pass_on(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell(ending: Ending, path: Path) -> int:
    for fault in ending.not_reached:
        _say(f"not reached: {fault} at rank {fault.rank}, step {fault.step}")
    for process in ending.left_behind:
        _say(f"left behind, and killed: process {process}")
    _say(f"the command ended with {ending.status}; record: {path / RECORD}")
    return ending.status or (1 if ending.left_behind else 0)


def _say(text: str) -> None:
    print(f"hierdist chaos: {text}", file=sys.stderr, flush=True)


def _kinds_in_words() -> str:
    lines = ["Each fault has a kind, a rank and a step, and the options of its kind:"]
    for name, kind in KINDS.items():
        options = ", ".join(
            f"{option} (needed)" if default is REQUIRED else f"{option}={default}" if default is not None else option
            for option, default in kind.options.items()
        )
        lines.append(f"  {name:10} {kind.summary}" + (f"\n{'':13}{options}" if options else ""))
    lines.append("seconds: how long it lasts; without, for good. host: one of another name than the rank's.")
    return "\n".join(lines)


CHAOS = Command(
    "Launch a run, hit it with faults at given ranks and steps, and say what became of it.", _add_arguments, _run
)
