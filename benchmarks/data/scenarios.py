"""What is measured: an arm after the other, in turns, on hosts that are network namespaces, one of them the store."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import formats
from benchmarks.data.arms import ARMS
from benchmarks.data.epochs import Job, Ran, run_epochs
from tests.support.cluster import NamespaceCluster
from tests.support.forkserver import PRELOADED, ForkServer
from tests.support.http_store import HttpStore

DEADLINE_S = 300.0
BUCKET = "data"
HOSTS = "abcdefgh"


@dataclass(frozen=True)
class Scenario:
    """Ranks, and where they read.

    Attributes:
        ranks: Number on each host.
        arms: What is compared; ratios are to the first.
        stored: Whether the data are in shared storage; else on each host's disk.
        rate_mbit: Of the store's link, in Mbit/s; ``None``: unshaped.
        epochs: The first with an empty cache, or with nothing in the page cache.
    """

    ranks: tuple[int, ...]
    arms: tuple[str, ...]
    stored: bool
    rate_mbit: float | None = None
    epochs: int = 2


OURS = ("hierdist", "hierdist threads")
PEERS = ("litdata", "litdata workers", "streaming", "streaming workers", "webdataset", "webdataset workers")
BYTES = ("hierdist", "litdata", "streaming", "webdataset", "naive")

SCENARIOS: dict[str, Scenario] = {
    "bytes:1": Scenario((1,), BYTES, stored=True),
    "bytes:2": Scenario((2,), BYTES, stored=True),
    "bytes:4": Scenario((2, 2), BYTES, stored=True),
    "store:1gbit": Scenario((2, 2), (*OURS, *PEERS), stored=True, rate_mbit=1000),
    "store:unshaped": Scenario((2, 2), (*OURS, *PEERS), stored=True),
    "local": Scenario((2, 2), (*OURS, "hierdist processes", *PEERS, "mapped", "mapped workers"), stored=False),
}


class DataSets:
    """The samples in each format that is asked for, made when it is.

    Args:
        folder: Served as the store's root.
        num_samples: In each.
        chunk_bytes: What is fetched at once.
    """

    def __init__(self, folder: Path, *, num_samples: int, chunk_bytes: int) -> None:
        self.root = folder
        self.num_samples = num_samples
        self._chunk_bytes = chunk_bytes
        self._sizes: dict[str, int] = {}
        (folder / BUCKET).mkdir(parents=True)
        formats.make_tokens(folder, num_samples)

    def get(self, name: str) -> tuple[Path, int]:
        """Folder and bytes."""
        folder = self.root / BUCKET / name
        if name not in self._sizes:
            self._sizes[name] = formats.make(name, formats.open_tokens(self.root), folder, self._chunk_bytes)
        return folder, self._sizes[name]


def run_scenario(
    scenario: Scenario,
    data: DataSets,
    *,
    rounds: int,
    batch_size: int,
    limit_s: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """All rounds, but for those that would not end within ``limit_s`` seconds."""
    start_s = time.monotonic()
    arms = tuple(arm for arm in scenario.arms if not ARMS[arm].is_missing)
    for arm in scenario.arms:
        if arm not in arms:
            say(f"  {arm} is left out: {ARMS[arm].package} is not installed")
    sizes = {arm: data.get(ARMS[arm].data)[1] for arm in arms}
    placement: dict[str, list[int]] = {}
    for host, count in zip(HOSTS, scenario.ranks, strict=False):
        first = sum(len(ranks) for ranks in placement.values())
        placement[host] = list(range(first, first + count))
    seen: dict[str, list[list[Ran]]] = {arm: [] for arm in arms}
    with ExitStack() as stack:
        server = stack.enter_context(ForkServer([*PRELOADED, "benchmarks.data.preloaded"]))
        cluster = stack.enter_context(NamespaceCluster(len(scenario.ranks) + 1))
        pool = stack.enter_context(cluster.pool(placement, server=server))
        host = cluster[HOSTS[len(scenario.ranks)]]
        store = stack.enter_context(HttpStore(data.root, host=host))
        host.set_rate(scenario.rate_mbit)
        for number in range(rounds):
            taken_s = time.monotonic() - start_s
            if number and taken_s * (number + 1) / number > limit_s:
                say(f"  {number} rounds have taken {taken_s:.0f} s; another one would be too long")
                break
            for arm in arms:
                with ExitStack() as once:
                    job = Job(
                        arm=arm,
                        folder=data.get(ARMS[arm].data)[0],
                        store_url=store.url if scenario.stored else None,
                        scratch=once.enter_context(scratch(placement)),
                        memory=once.enter_context(scratch(placement, parent=Path("/dev/shm"))),
                        batch_size=batch_size,
                        epochs=scenario.epochs,
                    )
                    if not scenario.stored:
                        formats.forget(job.folder)
                    seen[arm].append(
                        pool.run(
                            run_epochs,
                            args=(job,),
                            deadline_s=DEADLINE_S,
                            fresh=True,
                            env={**store.s3_variables, "NNODES": str(len(placement))},
                            env_per_rank=[{"GLOBAL_RANK": str(rank)} for rank in range(sum(scenario.ranks))],
                        )
                    )
                say(f"  round {number + 1}/{rounds} {arm}: {_line(seen[arm][-1])}")
    return summary(scenario, seen, sizes=sizes, num_samples=data.num_samples)


@contextmanager
def scratch(names: Iterable[str], *, parent: Path | None = None) -> Iterator[Path]:
    """A folder with others in it, removed at the end with all that libraries have left there."""
    with tempfile.TemporaryDirectory(prefix="hierdist-bench-", dir=parent) as path:
        for name in names:
            Path(path, name).mkdir()
        yield Path(path)


def rates(ranks: Sequence[Ran]) -> list[float]:
    """Samples a second of all ranks together, an epoch."""
    return [
        sum(len(e.samples) for e in epochs) / (max(e.end_s for e in epochs) - min(e.start_s for e in epochs))
        for epochs in zip(*(ran.epochs for ran in ranks), strict=True)
    ]


def first_batch_s(ranks: Sequence[Ran]) -> float:
    """Seconds to open the data set, and from the first epoch's start to the last rank's first batch."""
    first = [ran.epochs[0] for ran in ranks]
    return max(ran.open_s for ran in ranks) + max(e.first_s for e in first) - min(e.start_s for e in first)


def summary(
    scenario: Scenario, seen: Mapping[str, list[list[Ran]]], *, sizes: Mapping[str, int], num_samples: int
) -> dict[str, Any]:
    """Medians over rounds, and of ratios within rounds, an arm."""
    base = next(iter(seen))
    rows: dict[str, Any] = {}
    for arm, rounds in seen.items():
        cold = [rates(ranks)[0] for ranks in rounds]
        warm = [statistics.median(rates(ranks)[1:]) for ranks in rounds] if scenario.epochs > 1 else []
        base_rates = [rates(ranks) for ranks in seen[base]]
        ratios = {
            "cold": [own / theirs[0] for own, theirs in zip(cold, base_rates, strict=True)],
            "warm": [own / statistics.median(theirs[1:]) for own, theirs in zip(warm, base_rates, strict=False)],
        }
        rows[arm] = {
            "size_bytes": sizes[arm],
            "cold_samples_per_s": statistics.median(cold),
            "warm_samples_per_s": statistics.median(warm) if warm else None,
            "times_of_first": {key: _spread(values) for key, values in ratios.items() if values},
            "first_batch_s": statistics.median(first_batch_s(ranks) for ranks in rounds),
            "epochs": [_epoch(rounds, number, sizes[arm], num_samples) for number in range(scenario.epochs)],
            "all": {"cold": cold, "warm": warm},
        }
    return {"scenario": asdict(scenario), "num_samples": num_samples, "arms": rows}


def _epoch(rounds: Sequence[Sequence[Ran]], number: int, size_bytes: int, num_samples: int) -> dict[str, Any]:
    """The worst of the rounds: what storage sent, over the data set, and which samples were not given just once."""
    link, served, lost, again = [], [], [], []
    for ranks in rounds:
        epochs = [ran.epochs[number] for ran in ranks]
        times = np.bincount(np.concatenate([epoch.samples for epoch in epochs]), minlength=num_samples)
        link.append(max(epoch.link_bytes for epoch in epochs) / size_bytes)
        served.append(max(epoch.served_bytes for epoch in epochs) / size_bytes)
        lost.append(int((times == 0).sum()))
        again.append(int(np.maximum(times - 1, 0).sum()))
    return {
        "link_over_size": max(link),
        "served_over_size": max(served),
        "samples_lost": max(lost),
        "samples_repeated": max(again),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _line(ranks: Sequence[Ran]) -> str:
    each = ", ".join(f"{rate:,.0f}" for rate in rates(ranks))
    mb = ", ".join(f"{max(e.link_bytes for e in es) / 1e6:.0f}" for es in zip(*(r.epochs for r in ranks), strict=True))
    return f"{each} samples/s; first batch after {first_batch_s(ranks):.2f} s; {mb} MB sent by the store"
