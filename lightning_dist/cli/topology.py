"""``hierdist topology``: hosts, ranks, links, process groups, and the bytes each host sends per step."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

import torch
from rich.console import Console

from lightning_dist.cli.command import Command
from lightning_dist.cli.launched import Place, launched_as, rendezvous
from lightning_dist.cli.quantities import check_positive, number_of
from lightning_dist.config import TIER_CHOICES, ProbeConfig, TopologyConfig
from lightning_dist.errors import ConfigError, unknown_option
from lightning_dist.topology.discover import apply_tiers, discover, host_identity
from lightning_dist.topology.layout import AXIS_NAMES, Axes, Layout
from lightning_dist.topology.probe import probe
from lightning_dist.topology.report import Report, report_of, tables, verdict
from lightning_dist.topology.spec import Cluster

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
DEFAULT_GRADIENT_BYTES = 100e6


def _add_topology_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cluster",
        metavar="SHAPE",
        help="a what-if instead of this machine: 2x4, 3+1, 2x4:cyclic, 2x2x4 (two switches)",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--gradient-bytes", type=float, metavar="BYTES", help="size of the gradient of a step")
    size.add_argument("--gradient-mb", type=float, metavar="MB", help="the same in units of 10^6 bytes (default: 100)")
    size.add_argument("--parameters", metavar="N", help="the same as a number of parameters: 25000000, 25M, 7B")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPE_BYTES), default="fp32", help="type of the gradients, for --parameters"
    )
    parser.add_argument("--axes", metavar="AXES", help="list the groups of these axes too, e.g. pp=2,dp_shard=2,tp=2")
    parser.add_argument("--tiers", choices=TIER_CHOICES, default="auto", help="how many tiers to tell apart")
    parser.add_argument("--host", metavar="NAME", help="name of this process's host, instead of finding it out")
    parser.add_argument(
        "--switch",
        action="append",
        default=[],
        metavar="NAME=HOST,HOST",
        help="a switch and the hosts under it; once for each switch",
    )
    parser.add_argument("--probe", action="store_true", help="measure the links (less than two seconds)")
    parser.add_argument("--refresh", action="store_true", help="with --probe: measure again although it is known")
    parser.add_argument("--cache-dir", metavar="FOLDER", help="with --probe: where measurements are kept")
    parser.add_argument("--timeout-s", type=float, default=60.0, metavar="S", help="how long to wait for other ranks")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _run_topology(arguments: argparse.Namespace) -> int:
    gradient_bytes = _gradient_bytes(arguments)
    config = TopologyConfig(
        tiers=arguments.tiers,
        host=arguments.host,
        switches=_switches(arguments.switch),
        probe=ProbeConfig(enabled=arguments.probe, cache_dir=arguments.cache_dir, refresh=arguments.refresh),
    )
    check_positive("--timeout-s", arguments.timeout_s, example="60")
    rank, cluster, sources = 0, None, None
    if arguments.cluster is not None:
        if arguments.probe:
            raise ConfigError("--probe measures the machine it runs on; leave it out with --cluster")
        cluster = apply_tiers(Cluster.parse(arguments.cluster), config)
    else:
        place = launched_as(os.environ)
        if place is None:
            cluster, sources = _this_machine(config)
        else:
            rank = place.rank
            cluster, sources = _all_ranks(config, place, arguments.timeout_s)
    if rank == 0:
        layout = Layout.place(cluster, _axes(arguments.axes)) if arguments.axes else None
        report = report_of(cluster, gradient_bytes=gradient_bytes, sources=sources, layout=layout)
        _print(report, as_json=arguments.json)
    return 0


def _this_machine(config: TopologyConfig) -> tuple[Cluster, list[str]]:
    """Without a launcher: this machine, with one rank for each GPU, or one."""
    identity = host_identity(os.environ, configured=config.host)
    num_ranks = max(torch.cuda.device_count(), 1)
    cluster = apply_tiers(Cluster((identity.label,) * num_ranks), config)
    return cluster, [identity.source.value] * num_ranks


def _all_ranks(config: TopologyConfig, place: Place, timeout_s: float) -> tuple[Cluster, list[str]]:
    """Under a launcher: meet the other ranks, and find out where each of them sits."""
    rank, size = place.rank, place.world_size
    with rendezvous(place, timeout_s) as (store, group):
        found = discover(config, rank=rank, world_size=size, store=store, environ=os.environ, timeout_s=timeout_s)
        cluster = probe(found.cluster, config=config.probe, rank=rank, group=group, timeout_s=timeout_s)
        return cluster, [source.value for source in found.sources]


def _print(report: Report, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
        return
    # A file or a launcher's pipe has no width to keep to, and a table cut at 80 columns is no use.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    for table in tables(report):
        console.print(table)
        console.print()
    for line in verdict(report):
        console.print(line, soft_wrap=True, highlight=False)


def _gradient_bytes(arguments: argparse.Namespace) -> float:
    if arguments.parameters is not None:
        size_bytes = number_of("--parameters", arguments.parameters) * DTYPE_BYTES[arguments.dtype]
    elif arguments.gradient_mb is not None:
        check_positive("--gradient-mb", arguments.gradient_mb, example="100")
        size_bytes = arguments.gradient_mb * 1e6
    else:
        size_bytes = DEFAULT_GRADIENT_BYTES if arguments.gradient_bytes is None else arguments.gradient_bytes
        check_positive("--gradient-bytes", size_bytes, example="1e8")
    if not 0 < size_bytes < float("inf"):
        raise ConfigError(f"the gradient must have a positive size, got {size_bytes:g} bytes")
    return float(size_bytes)


def _switches(given: Sequence[str]) -> dict[str, list[str]] | None:
    switches: dict[str, list[str]] = {}
    for text in given:
        name, separator, hosts = text.partition("=")
        if not (name and separator and hosts):
            raise ConfigError(f"--switch {text!r} cannot be read; write e.g. --switch rack1=a,b")
        switches.setdefault(name, []).extend(hosts.split(","))
    return switches or None


def _axes(text: str) -> Axes:
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, _, size = item.partition("=")
        if name not in AXIS_NAMES:
            raise unknown_option("axis", name, AXIS_NAMES)
        if not size.isdecimal():
            raise ConfigError(f"--axes {text!r} cannot be read; write e.g. --axes pp=2,dp_shard=2,tp=2")
        sizes[name] = int(size)
    return Axes(**sizes)


TOPOLOGY = Command(
    "Show hosts, ranks, links and process groups, and the bytes each host sends per step.",
    _add_topology_arguments,
    _run_topology,
)
