"""Step time and bytes of gradient synchronisation, on hosts that are network namespaces with shaped links.

    python -m benchmarks.step_time --scenario 2x2 2x2:cyclic --pairs 5
    python -m benchmarks.step_time --all

Arms alternate (A B C, A B C, ...) on the same hosts; the figure is the median of the ratios within a round, which
drifts of the machine do not move. Needs root and iproute2. Results go to ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.arms import ARMS, Load, Measured, run_arm
from benchmarks.ending import clean_up_when_terminated
from benchmarks.record import RESULTS, commit, today
from benchmarks.workload import gradient_bytes, make_model
from lightning_dist.topology import Cluster
from tests.support.cluster import NamespaceCluster
from tests.support.ranks import RankPool

PEERS = ("lightning_ddp", "hierdist", "fsdp2_hybrid")
ZERO2 = ("fsdp2_zero2", "hierdist_zero2", "hierdist_zero1", "deepspeed_zero2", "deepspeed_zero1")
ZERO3 = ("fsdp2_zero3", "hierdist_zero3", "hierdist_zero3_host", "hierdist_hsdp", "fsdp2_hybrid", "deepspeed_zero3")
HYBRID = ("hierdist_hsdp", "fsdp2_hybrid", "fsdp2_hybrid_by_rank")


@dataclass(frozen=True)
class Scenario:
    """One cluster, one load, the arms to compare.

    Attributes:
        cluster: Notation of the placement, e.g. ``2x2:cyclic``.
        rate_mbit: Rate of each host's link, in Mbit/s; ``None``: unshaped.
        arms: What is compared; ratios are of the first.
        load: Batch, pretended compute, accumulation and number of steps.
    """

    cluster: str
    rate_mbit: float | None
    arms: tuple[str, ...]
    load: Load = field(default_factory=Load)


SCENARIOS: dict[str, Scenario] = {
    "2x2": Scenario("2x2", 200, (*PEERS, "hierdist_sockets", "ddp_fp16", "hierdist_bf16", "compute_alone")),
    "2x2:cyclic": Scenario("2x2:cyclic", 200, (*PEERS, "ddp_fp16", "hierdist_bf16")),
    "2x4": Scenario("2x4", 200, (*PEERS, "hierdist_sockets", "compute_alone")),
    "2x4:cyclic": Scenario("2x4:cyclic", 200, PEERS),
    "4x2": Scenario("4x2", 200, PEERS),
    "4x2:cyclic": Scenario("4x2:cyclic", 200, PEERS),
    "zero2:2x2": Scenario("2x2", 200, ZERO2),
    "zero2:2x2:cyclic": Scenario("2x2:cyclic", 200, ZERO2),
    "zero2:one-host": Scenario("2", None, ZERO2, Load(warmup=3, steps=10)),
    "zero3:2x2": Scenario("2x2", 200, ZERO3),
    "zero3:2x2:cyclic": Scenario("2x2:cyclic", 200, ZERO3),
    "zero3:one-host": Scenario("2", None, ZERO3, Load(warmup=3, steps=10)),
    "hsdp:2x2:accumulated": Scenario("2x2", 200, HYBRID, Load(accumulation=4)),
    "hsdp:2x2:cyclic:accumulated": Scenario("2x2:cyclic", 200, HYBRID, Load(accumulation=4)),
    "one-host": Scenario("2", None, PEERS, Load(warmup=3, steps=15)),
    "2x2:unshaped": Scenario("2x2", None, PEERS, Load(warmup=3, steps=10)),
    "powersgd:2x2": Scenario(
        "2x2", 100, ("lightning_ddp", "hierdist", "ddp_powersgd", "hierdist_powersgd"), Load(warmup=3, steps=3)
    ),
    "overlap:equal": Scenario(
        "2x2", 200, ("hierdist", "lightning_ddp", "compute_alone", "communication_alone"), Load(compute_s=4.7)
    ),
    "overlap:backward-equal": Scenario(
        "2x2", 200, ("hierdist", "lightning_ddp", "compute_alone", "communication_alone"), Load(compute_s=7.0)
    ),
}


def with_arms(scenario: Scenario, arms: Sequence[str] | None) -> Scenario:
    """The scenario with the first of its arms and those asked for, or as it is if none are."""
    base = scenario.arms[0]
    return scenario if not arms else replace(scenario, arms=(base, *(arm for arm in arms if arm != base)))


def run_scenario(scenario: Scenario, pairs: int, console: Console) -> dict[str, Any]:
    """All rounds of one scenario: seconds and bytes of each arm, and the ratios within rounds."""
    cluster = Cluster.parse(scenario.cluster)
    names = "abcdefghijkl"
    placement = {names[i]: list(cluster.ranks_of_host(host)) for i, host in enumerate(cluster.hosts)}
    rounds: dict[str, list[list[Measured]]] = {arm: [] for arm in scenario.arms}
    with ExitStack() as stack:
        if cluster.num_hosts > 1:
            hosts = stack.enter_context(NamespaceCluster(cluster.num_hosts, rate_mbit=scenario.rate_mbit))
            pool = stack.enter_context(hosts.pool(placement))
        else:
            pool = stack.enter_context(RankPool(placement=placement))
        for number in range(pairs):
            for arm in scenario.arms:
                rounds[arm].append(pool.run(run_arm, args=(arm, scenario.load), deadline_s=400.0, fresh=True))
                seconds = _step_s(rounds[arm][-1])
                console.print(f"  {scenario.cluster} round {number + 1}/{pairs} {arm}: {seconds:.3f} s a step")
    return _summary(scenario, cluster, placement, rounds)


def _step_s(ranks: Sequence[Measured]) -> float:
    """Median over steps of the slowest rank's time."""
    return statistics.median(max(step) for step in zip(*(rank.step_s for rank in ranks), strict=True))


def _summary(
    scenario: Scenario, cluster: Cluster, placement: dict[str, list[int]], rounds: dict[str, list[list[Measured]]]
) -> dict[str, Any]:
    size = gradient_bytes(make_model())
    base = scenario.arms[0]
    arms: dict[str, Any] = {}
    for arm, measured in rounds.items():
        seconds = [_step_s(ranks) for ranks in measured]
        ratios = [_step_s(first) / own for first, own in zip(rounds[base], seconds, strict=True)]
        per_host = [max(ranks[r].sent_bytes for r in on_host) for ranks in measured for on_host in placement.values()]
        arms[arm] = {
            "step_s": statistics.median(seconds),
            "step_s_all": seconds,
            f"times_faster_than_{base}": statistics.median(ratios),
            "ratio_spread": [min(ratios), max(ratios)],
            "bytes_per_host_over_gradients": max(per_host) / scenario.load.steps / size if per_host else 0.0,
        }
        # Until the last rank has its first bucket, that rank's compute is not hidden by anything.
        windows = [min(w) for ranks in measured for w in zip(*(rank.exchange_s for rank in ranks), strict=True)]
        if windows and scenario.rate_mbit:
            hosts = cluster.num_hosts
            wire_s = 2 * size * (hosts - 1) / hosts / (scenario.rate_mbit * 1e6 / 8)
            arms[arm]["exchange_s_all"] = windows
            arms[arm]["wire_limit_s"] = wire_s
            arms[arm]["wire_efficiency"] = wire_s / statistics.median(windows)
    return {"scenario": asdict(scenario), "gradient_bytes": size, "arms": arms}


def show(results: dict[str, Any], console: Console) -> None:
    """Print one table a scenario."""
    for name, result in results.items():
        base = result["scenario"]["arms"][0]
        table = Table(title=f"{name}, {result['scenario']['rate_mbit'] or 'no'} Mbit/s limit")
        for column in ("arm", "step s", f"x faster than {base}", "spread", "bytes a host / M", "wire efficiency"):
            table.add_column(column, justify="left" if column == "arm" else "right")
        for arm, row in result["arms"].items():
            low, high = row["ratio_spread"]
            table.add_row(
                arm,
                f"{row['step_s']:.3f}",
                f"{row[f'times_faster_than_{base}']:.2f}",
                f"{low:.2f}-{high:.2f}",
                f"{row['bytes_per_host_over_gradients']:.3f}",
                f"{row['wire_efficiency']:.3f}" if "wire_efficiency" in row and arm == "hierdist" else "",
            )
        console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scenarios asked for and write what they gave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", nargs="+", choices=list(SCENARIOS), default=["2x2"])
    parser.add_argument("--all", action="store_true", help="every scenario")
    parser.add_argument(
        "--arms", nargs="+", choices=list(ARMS), help="these arms only; the scenario's first always runs"
    )
    parser.add_argument("--pairs", type=int, default=5, help="rounds of all arms")
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/<date>-step-time.json")
    arguments = parser.parse_args(argv)
    console = Console()
    path = arguments.output or RESULTS / f"{today()}-step-time.json"
    document = json.loads(path.read_text()) if path.exists() else {"results": {}}
    for name in SCENARIOS if arguments.all else arguments.scenario:
        scenario = with_arms(SCENARIOS[name], arguments.arms)
        result = run_scenario(scenario, arguments.pairs, console)
        show({name: result}, console)
        chosen = f" --arms {' '.join(arguments.arms)}" if arguments.arms else ""
        result["command"] = f"python -m benchmarks.step_time --scenario {name} --pairs {arguments.pairs}{chosen}"
        result["commit"] = commit()
        result["date"] = today()
        document["results"][name] = result
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1))
    console.print(f"written: {path}")
    return 0


if __name__ == "__main__":
    clean_up_when_terminated()
    sys.exit(main())
