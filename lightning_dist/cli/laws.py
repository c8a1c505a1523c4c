"""``hierdist laws``: what the formulas say of given numbers."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_dist import laws
from lightning_dist.cli.command import Command
from lightning_dist.cli.quantities import check_positive, check_share, number_of, rate_of
from lightning_dist.cli.topology import DTYPE_BYTES
from lightning_dist.errors import ConfigError

_LINK = "100gbit"
_PARAMETERS = "70B"
_SIZES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_TIMES = (("days", 86400.0), ("h", 3600.0), ("min", 60.0))


@dataclass(frozen=True)
class Numbers:
    """What the formulas are asked about.

    Attributes:
        ranks: All.
        hosts: Over which they are spread evenly.
        parameters: Of the model.
        gradient_bytes: A value of its gradient.
        link_bytes_per_s: What a rank's link carries in one direction.
        parallel_fraction: Of the work, what is spread over the ranks.
        stages: Of a pipeline.
        micro_batches: Of a batch.
        virtual_stages: A rank.
        failures_per_hour: How likely one rank fails within an hour.
        hours: Of the run.
        save_s: For which a checkpoint holds training.
    """

    ranks: int
    hosts: int
    parameters: float
    gradient_bytes: float
    link_bytes_per_s: float
    parallel_fraction: float
    stages: int
    micro_batches: int
    virtual_stages: int
    failures_per_hour: float
    hours: float
    save_s: float


@dataclass(frozen=True)
class Line:
    """One figure.

    Attributes:
        law: Whose it is.
        what: What it says.
        value: In the unit.
        unit: ``"bytes"``, ``"s"``, ``"1"`` (a share) or ``"times"``.
        formula: With the field's letters.
        source: Where it is from.
    """

    law: str
    what: str
    value: float
    unit: str
    formula: str
    source: str


def lines_of(numbers: Numbers) -> tuple[Line, ...]:
    """What all formulas say."""
    return (*_amdahl(numbers), *_ring(numbers), *_bubble(numbers), *_failures(numbers), *_zero(numbers))


def _amdahl(numbers: Numbers) -> Iterator[Line]:
    law, source = "Amdahl", "Amdahl, AFIPS 1967"
    share = numbers.parallel_fraction
    speedup = laws.amdahl_speedup(share, numbers.ranks)
    yield Line(law, f"speed-up by {numbers.ranks} ranks", speedup, "times", "1 / (1 - p + p/n)", source)
    yield Line(law, "by any number of ranks", laws.amdahl_limit(share), "times", "1 / (1 - p)", source)


def _ring(numbers: Numbers) -> Iterator[Line]:
    law, source, timed = "ring all-reduce", "Patarasu and Yuan, JPDC 2009", "Thakur et al., 2005"
    size, ranks, rate = numbers.parameters * numbers.gradient_bytes, numbers.ranks, numbers.link_bytes_per_s
    sent, taken_s = laws.ring_all_reduce_bytes(size, ranks), laws.ring_all_reduce_time_s(size, ranks, rate)
    one_way_s = laws.ring_reduce_scatter_time_s(size, ranks, rate)
    yield Line(law, "gradients", size, "bytes", "M", source)
    yield Line(law, "each rank sends, and receives as many", sent, "bytes", "2M(n-1)/n", source)
    yield Line(
        law, "time: there and back, the link carrying its rate each way", taken_s, "s", "2M(n-1)/n / rate", timed
    )
    yield Line(law, "time: one way only, a reduce-scatter", one_way_s, "s", "M(n-1)/n / rate", timed)
    if numbers.hosts > 1:
        by_host = laws.hierarchical_bytes_per_host(size, numbers.hosts)
        gain = laws.hierarchical_gain(ranks, numbers.hosts)
        law = "hierarchical all-reduce"
        yield Line(law, "each host sends", by_host, "bytes", "2M(H-1)/H", source)
        yield Line(law, "fewer than by a ring, ranks in order", gain, "times", "H(n-1) / n(H-1)", source)


def _bubble(numbers: Numbers) -> Iterator[Line]:
    idle = laws.pipeline_bubble(numbers.stages, numbers.micro_batches, virtual_stages=numbers.virtual_stages)
    what = f"{numbers.stages} stages idle, with {numbers.micro_batches} micro-batches"
    yield Line("pipeline bubble", what, idle, "1", "(P-1) / (VM + P-1)", "Huang et al., NeurIPS 2019")


def _failures(numbers: Numbers) -> Iterator[Line]:
    rate, ranks = numbers.failures_per_hour, numbers.ranks
    chance, mean_s = laws.failure_probability(rate, ranks, numbers.hours), laws.time_between_failures_s(rate, ranks)
    source = "Barlow and Proschan, 1965"
    yield Line("failures", f"at least one in {numbers.hours:g} h", chance, "1", "1 - (1-p)^(nt)", source)
    yield Line("failures", "time between two, on average", mean_s, "s", "1 h / np", source)
    if not math.isfinite(mean_s):
        return
    young_s, daly_s = laws.young_interval_s(numbers.save_s, mean_s), laws.daly_interval_s(numbers.save_s, mean_s)
    lost = laws.lost_time_share(daly_s, numbers.save_s, mean_s)
    law = "checkpoints"
    yield Line(law, "work between two, by Young", young_s, "s", "sqrt(2 delta M)", "Young, CACM 1974")
    yield Line(law, "work between two, by Daly", daly_s, "s", "sqrt(2 delta M) (1 + ...) - delta", "Daly, FGCS 2006")
    yield Line(law, "time lost then, saves and work done again", lost, "1", "1 - tau / spent", "Daly, FGCS 2006")


def _zero(numbers: Numbers) -> Iterator[Line]:
    law, source = "memory of a rank, mixed precision and Adam", "Rajbhandari et al., SC 2020"
    formulas = ("(2 + 2 + 12) Psi", "(2 + 2 + 12/N) Psi", "(2 + 14/N) Psi", "16 Psi / N")
    for stage, formula in enumerate(formulas):
        held = laws.zero_state_bytes(numbers.parameters, numbers.ranks, stage=stage)
        yield Line(law, f"ZeRO stage {stage}" if stage else "nothing sharded", held, "bytes", formula, source)


def _add_laws_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=128, metavar="N", help="ranks (default: 128)")
    parser.add_argument("--hosts", type=int, metavar="N", help="hosts (default: one for each 8 ranks)")
    parser.add_argument(
        "--parameters", default=_PARAMETERS, metavar="N", help=f"of the model: 25M, 7B (default: {_PARAMETERS})"
    )
    parser.add_argument(
        "--dtype", choices=tuple(DTYPE_BYTES), default="bf16", help="type of the gradients (default: bf16)"
    )
    parser.add_argument(
        "--link",
        default=_LINK,
        metavar="RATE",
        help=f"what a rank's link carries in one direction: 400mbit, 12.5GB/s (default: {_LINK})",
    )
    parser.add_argument(
        "--parallel-fraction",
        type=float,
        default=0.9,
        metavar="P",
        help="of the work, spread over ranks (default: 0.9)",
    )
    parser.add_argument("--stages", type=int, default=8, metavar="N", help="of a pipeline (default: 8)")
    parser.add_argument("--micro-batches", type=int, default=28, metavar="N", help="of a batch (default: 28)")
    parser.add_argument("--virtual-stages", type=int, default=1, metavar="N", help="stages a rank (default: 1)")
    parser.add_argument(
        "--failure-rate", type=float, default=1e-4, metavar="P", help="of one rank an hour (default: 1e-4)"
    )
    parser.add_argument("--hours", type=float, default=24.0, metavar="H", help="of the run (default: 24)")
    parser.add_argument(
        "--save-s", type=float, default=60.0, metavar="S", help="for which a checkpoint holds training (default: 60)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _run_laws(arguments: argparse.Namespace) -> int:
    try:
        lines = lines_of(_numbers(arguments))
    except ValueError as error:  # of a formula; it names its argument, as the options are called
        raise ConfigError(str(error)) from error
    if arguments.json:
        print(json.dumps([_plain(line) for line in lines], indent=2))
        return 0
    console = Console() if sys.stdout.isatty() else Console(width=160)
    console.print(_table(lines))
    return 0


def _plain(line: Line) -> dict[str, Any]:
    """What JSON can hold: what has no limit is null."""
    return {**asdict(line), "value": line.value if math.isfinite(line.value) else None}


def _numbers(arguments: argparse.Namespace) -> Numbers:
    parameters = number_of("--parameters", arguments.parameters)
    if not 0 < parameters < math.inf:
        raise ConfigError(f"--parameters must be positive, got {arguments.parameters}")
    if arguments.ranks < 1:
        raise ConfigError(f"--ranks must be at least 1, got {arguments.ranks}")
    hosts = max(arguments.ranks // 8, 1) if arguments.hosts is None else arguments.hosts
    if not 1 <= hosts <= arguments.ranks:
        raise ConfigError(f"--hosts must be between 1 and --ranks {arguments.ranks}, got {hosts}")
    check_share("--parallel-fraction", arguments.parallel_fraction, example="0.9")
    check_share("--failure-rate", arguments.failure_rate, example="1e-4")
    check_positive("--hours", arguments.hours, example="24")
    check_positive("--save-s", arguments.save_s, example="60")
    return Numbers(
        ranks=arguments.ranks,
        hosts=hosts,
        parameters=parameters,
        gradient_bytes=DTYPE_BYTES[arguments.dtype],
        link_bytes_per_s=rate_of("--link", arguments.link),
        parallel_fraction=arguments.parallel_fraction,
        stages=arguments.stages,
        micro_batches=arguments.micro_batches,
        virtual_stages=arguments.virtual_stages,
        failures_per_hour=arguments.failure_rate,
        hours=arguments.hours,
        save_s=arguments.save_s,
    )


def _table(lines: tuple[Line, ...]) -> Table:
    table = Table("law", "says", "value", "formula", "source")
    table.columns[2].justify = "right"
    law = ""
    for line in lines:
        if law and line.law != law:
            table.add_section()
        table.add_row("" if line.law == law else line.law, line.what, _shown(line), line.formula, line.source)
        law = line.law
    return table


def _shown(line: Line) -> str:
    if line.unit == "1":
        return f"{line.value:.1%}"
    if line.unit == "times":
        return f"{line.value:.2f} x" if math.isfinite(line.value) else "no limit"
    if not math.isfinite(line.value):
        return "never"
    scale = _SIZES if line.unit == "bytes" else _TIMES
    for unit, factor in scale:
        if line.value >= factor:
            return f"{line.value / factor:.1f} {unit}"
    return f"{line.value:.1f} {line.unit}"


LAWS = Command(
    "Print what the laws of scaling say of given numbers: Amdahl, ring volume, bubble, failures, memory.",
    _add_laws_arguments,
    _run_laws,
)
