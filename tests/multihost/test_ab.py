"""``hierdist ab`` given on each of two hosts that share no folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cluster import NamespaceCluster

# A rank a host: what it is told to be, without torch; on host b, a run of the arm that is to fail does.
SCRIPT = """
import json, os, sys
from pathlib import Path
given = dict(word.split("=", 1) for word in sys.argv[1:])
rank, seed = int(os.environ["NODE_RANK"]), int(given["seed"])
if rank and given["lr"] == "bad" and seed == 1:
    sys.exit("ValueError: not on this host")
with open(Path(os.environ["HIERDIST_CURVE"]) / f"curve-rank-{rank:05d}.jsonl", "w") as file:
    lines = [dict(kind="start", version=1, rank=rank, world_size=2, nodes=2)]
    for step in range(1, int(given["trainer.max_steps"]) + 1):
        lines.append(dict(kind="step", step=step, seconds=step * 0.1, loss=4 + rank + seed / 10 - step / 100, crc=seed))
    for line in [*lines, dict(kind="end", step=step)]:
        print(json.dumps(line), file=file)
"""


def test_the_first_host_leads_and_gathers_what_ranks_wrote(
    make_cluster: Callable[..., NamespaceCluster], tmp_path: Path
) -> None:
    cluster = make_cluster(2)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    first = cluster["a"]
    meet = ["--hosts", "2", "--rendezvous", f"{first.address}:{first.free_port()}"]
    words = ["-m", "lightning_dist.cli", "ab", "--a", "lr=good", "--b", "lr=bad", "--seeds", "3", "--steps", "20"]
    folders = {name: tmp_path / name for name in cluster.hosts}
    command = {name: [*words, *meet, "-o", folders[name], "--", "python", script] for name in folders}
    secret = {"HIERDIST_SECRET": "of a test, and long enough"}
    with cluster.start_on_hosts(command, env=secret) as hosts:
        results = hosts.wait(deadline_s=100)
    lead, other = results
    assert lead.returncode == other.returncode == 0, lead.output + other.output
    assert "not on this host" in lead.output, "the other host's last words"
    assert "safe here" in other.output
    values = json.loads((folders["a"] / "result.json").read_text())
    assert values["seeds"] == [0, 2], "the pair of the run that failed is left out"
    assert "10.77.0.2" in values["failed"]["b-seed1"]["why"]
    judged = next(row for row in values["quantities"] if row["name"] == "loss at equal steps")
    mean = pytest.approx(4 + 0.5 + 0.1 - 0.195, rel=1e-12)  # rounding of a few sums
    assert judged["a"] == judged["b"] == mean, "mean of both ranks, seeds and the last two steps"
    assert not any("left their losses here" in note for note in values["notes"])
