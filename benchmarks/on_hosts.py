"""A command run on several hosts that are network namespaces with shaped links, for ``hierdist ab`` around it.

    hierdist ab --a sync=hierarchical --b sync=powersgd --steps 100 -- python -m benchmarks.on_hosts --rate-mbit 100 --
        python examples/train.py model=gpt-tiny monitor=off trainer.devices=2 trainer.num_nodes=2

in one line. Each host runs the command once, with NODE_RANK, MASTER_ADDR and MASTER_PORT, and it starts its own ranks.
What the first host prints is printed. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.ending import clean_up_when_terminated
from lightning_dist.experiment.running import CURVE_VARIABLE
from tests.support.cluster import NamespaceCluster

HOURS_S = 3600.0


def main(argv: Sequence[str]) -> int:
    """Run it; the first status that is not 0, or 0."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.on_hosts", description="Run a command on several hosts."
    )
    parser.add_argument("--hosts", type=int, default=2, help="how many (default: 2)")
    parser.add_argument("--rate-mbit", type=float, help="of each host's link (default: no limit)")
    parser.add_argument("--deadline-s", type=float, default=HOURS_S, help="after which all is ended (default: an hour)")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    arguments = parser.parse_args(argv)
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    if not words:
        parser.error("there is no command; write it after --")
    environment = {name: os.environ[name] for name in (CURVE_VARIABLE,) if name in os.environ}
    with (
        NamespaceCluster(arguments.hosts, rate_mbit=arguments.rate_mbit) as cluster,
        cluster.start_on_hosts(words, env=environment, cwd=Path.cwd()) as hosts,
    ):
        results = hosts.wait(deadline_s=arguments.deadline_s)
    first, *others = results
    print(first.output, end="")
    for host in others:
        if host.returncode:
            print(host.output, end="", file=sys.stderr)
    return next((result.returncode for result in results if result.returncode), 0)


if __name__ == "__main__":
    clean_up_when_terminated()
    sys.exit(main(sys.argv[1:]))
