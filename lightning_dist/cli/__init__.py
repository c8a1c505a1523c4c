"""The ``hierdist`` command, also as ``python -m lightning_dist.cli``.

Each subcommand adds its arguments to a parser of its own and runs on what was parsed; :data:`COMMANDS` lists them.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from lightning_dist.cli.ab import AB
from lightning_dist.cli.chaos import CHAOS
from lightning_dist.cli.checkpoint import CHECKPOINT
from lightning_dist.cli.command import Command
from lightning_dist.cli.compare import COMPARE
from lightning_dist.cli.data import DATA
from lightning_dist.cli.doctor import DOCTOR
from lightning_dist.cli.history import HISTORY
from lightning_dist.cli.launch import LAUNCH
from lightning_dist.cli.laws import LAWS
from lightning_dist.cli.report import REPORT
from lightning_dist.cli.topology import TOPOLOGY
from lightning_dist.errors import HierDistError

COMMANDS: dict[str, Command] = {
    "topology": TOPOLOGY,
    "checkpoint": CHECKPOINT,
    "data": DATA,
    "compare": COMPARE,
    "history": HISTORY,
    "ab": AB,
    "doctor": DOCTOR,
    "chaos": CHAOS,
    "launch": LAUNCH,
    "laws": LAWS,
    "report": REPORT,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: The arguments; ``None``: those of the process.

    Returns:
        The exit status: 0, or 2 if what was asked for is wrong or did not work (the reason goes to stderr).
    """
    parser = argparse.ArgumentParser(prog="hierdist", description="Tools for distributed training across hosts.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.summary, description=command.summary)
        command.add_arguments(subparser)
    arguments = parser.parse_args(argv)
    try:
        code = COMMANDS[arguments.command].run(arguments)
        sys.stdout.flush()
    except HierDistError as error:
        print(f"hierdist {arguments.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has read enough; what is still buffered must not fail at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code
