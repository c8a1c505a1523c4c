"""``hierdist doctor`` on each of two hosts, around that host's part of a training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_dist.monitor.run_files import read_run
from tests.support.cluster import NamespaceCluster

SCRIPT = Path(__file__).parents[1] / "examples" / "apps" / "plain_training.py"
STEPS = 25


def doctor(output: Path, *options: str, nodes: int = 2) -> list[str]:
    examination = ["-m", "lightning_dist.cli", "doctor", "--steps", str(STEPS), "--output", str(output), *options]
    return [*examination, "--", sys.executable, str(SCRIPT), "ddp", "1", str(nodes)]


@pytest.mark.slow
def test_the_host_of_rank_0_says_the_verdict_over_all(
    make_cluster: Callable[..., NamespaceCluster], tmp_path: Path
) -> None:
    """Also where the other host was told of another folder, and of fewer steps: rank 0's word counts."""
    commands = {"a": doctor(tmp_path / "a"), "b": doctor(tmp_path / "b", "--steps", "5")}
    with make_cluster(2).start_on_hosts(commands, cwd=tmp_path, env={"COLUMNS": "200"}) as hosts:
        first, second = (each.check() for each in hosts.wait(deadline_s=100))
        assert hosts.survivors(within_s=5) == []
    record = read_run(tmp_path / "a" / "monitor")
    assert {rank: len(each.steps) for rank, each in record.ranks.items()} == {0: STEPS, 1: STEPS}
    assert "verdict" in first.output
    assert "verdict ─" not in second.output
    assert f"rank 1 of 2 trained here; the doctor on the host of rank 0 says the verdict, and writes {tmp_path}/a/" in (
        second.output
    )
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["monitor", "report.html"]
    assert not (tmp_path / "b").exists()
    assert not [host for host in (first, second) if "the script went on" in host.output]


@pytest.mark.slow
@pytest.mark.sweep
def test_a_host_that_shares_no_folder_says_what_to_copy(
    make_cluster: Callable[..., NamespaceCluster], tmp_path: Path
) -> None:
    """The second host has a disk of its own where the first one has its folder."""
    folder = tmp_path / "a"
    folder.mkdir()
    plain = doctor(folder)
    own_disk = f"mount -t tmpfs none {folder} && {sys.executable} {' '.join(plain)} && ls {folder} {folder}/monitor"
    commands = {"a": plain, "b": ["unshare", "--mount", "sh", "-c", own_disk]}
    with make_cluster(2).start_on_hosts(commands, cwd=tmp_path, env={"COLUMNS": "200"}) as hosts:
        first, second = (each.check() for each in hosts.wait(deadline_s=100))
    assert "not all steps of the ranks on other hosts are here" in first.output
    assert list(read_run(folder / "monitor").ranks) == [0]
    assert f"hierdist report {folder}/monitor COPY" in second.output
    assert "steps-00001.jsonl" in second.output
    assert "hierdist-doctor-" not in second.output, "what is not needed is removed there, too"


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.timeout(240)
def test_a_doctor_on_one_host_only_is_refused(make_cluster: Callable[..., NamespaceCluster], tmp_path: Path) -> None:
    plain = doctor(tmp_path / "a")
    commands = {"a": plain, "b": plain[plain.index("--") + 2 :]}
    with make_cluster(2).start_on_hosts(commands, cwd=tmp_path) as hosts:
        first, second = hosts.wait(deadline_s=200)
    assert first.returncode != 0
    assert "nothing was heard of 1 of 2 ranks (1); run it on each host" in first.output
    assert second.returncode != 0
