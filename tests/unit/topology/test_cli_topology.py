"""``hierdist topology``: what-ifs, this machine, and under a launcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_dist.cli import main
from lightning_dist.cli.launched import Place, launched_as
from lightning_dist.errors import LaunchError
from lightning_dist.topology.layout import Axes, Layout
from lightning_dist.topology.report import report_of, verdict
from lightning_dist.topology.spec import Cluster, Link, Tier

ROOT = Path(__file__).parents[3]
LAUNCHER_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "HIERDIST_HOST", "SLURMD_NODENAME")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["topology", *arguments, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert isinstance(values, dict)
    return values


@pytest.mark.parametrize(
    ("shape", "flat", "hierarchical", "ratio"),
    [
        ("2x2", 1.5, 1.0, 1.0),
        ("2x2:cyclic", 3.0, 1.0, 2.0),
        ("2x4:cyclic", 7.0, 1.0, 4.0),
        ("4x2", 1.75, 1.5, 1.0),
        ("3+1", 1.5, 1.0, 1.0),
        ("4", 0.0, 0.0, 1.0),
        ("2x2x2", 1.75, 1.5, 1.0),
    ],
)
def test_what_ifs(
    capsys: pytest.CaptureFixture[str], shape: str, flat: float, hierarchical: float, ratio: float
) -> None:
    values = as_json(capsys, "--cluster", shape, "--gradient-mb", "100")
    assert {host["flat_bytes"] for host in values["hosts"]} == {flat * 100e6}
    assert {host["hierarchical_bytes"] for host in values["hosts"]} == {hierarchical * 100e6}
    assert values["placement"]["ratio"] == ratio


def test_sizes_of_the_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    def size(*arguments: str) -> float:
        return float(as_json(capsys, "--cluster", "2x2", *arguments)["gradient_bytes"])

    assert size() == 100e6
    assert size("--gradient-bytes", "1000") == 1000
    assert size("--parameters", "27M") == 108e6
    assert size("--parameters", "27_000_000", "--dtype", "bf16") == 54e6
    assert size("--parameters", "1.5B", "--dtype", "fp64") == 12e9


def test_groups_switches_and_axes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--cluster",
        "4x2",
        "--switch",
        "r1=host0,host1",
        "--switch",
        "r2=host2,host3",
        "--axes",
        "dp_shard=4,tp=2",
    ]
    values = as_json(capsys, *arguments)
    assert [host["switch"] for host in values["hosts"]] == ["r1", "r1", "r2", "r2"]
    assert [group["tier"] for group in values["groups"]] == ["world", "host", "switch", "world", "world", "host"]
    assert values["groups"][-1]["groups"] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_tables_show_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--cluster", "2x2:cyclic"]) == 0
    output = capsys.readouterr().out
    for text in ("4 ranks on 2 hosts", "host1", "not measured", "[0,2] [1,3]", "300.0 MB", "150.0 MB", "100.0 MB"):
        assert text in output
    assert "costs a flat ring 2.00 times the traffic of the best one (ranks by host: 0, 2, 1, 3)" in output


def test_this_machine_without_a_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    values = as_json(capsys, "--host", "desk")
    assert [(host["host"], host["identity_from"]) for host in values["hosts"]] == [("desk", "config")]
    assert as_json(capsys)["hosts"][0]["identity_from"] in ("machine", "launcher")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "2y"], "cannot be read"),
        (["--cluster", "2x2", "--probe"], "leave it out with --cluster"),
        (["--cluster", "2x2", "--parameters", "many"], "write e.g. 25000000, 25M or 7B"),
        (["--cluster", "2x2", "--gradient-mb", "0"], "--gradient-mb must be a positive number"),
        (["--cluster", "2x2", "--parameters", "0"], "positive size"),
        (["--cluster", "2x2", "--switch", "a"], "--switch rack1=a,b"),
        (["--cluster", "2x2", "--switch", "a=x"], "hosts are: host0, host1"),
        (["--cluster", "2x2", "--tiers", "three_tier"], "needs topology.switches"),
        (["--cluster", "2x2", "--axes", "dp=4"], "axis='dp' is unknown"),
        (["--cluster", "2x2", "--axes", "tp=x"], "write e.g. --axes"),
        (["--cluster", "2x2", "--axes", "tp=4"], "tp must stay inside a host"),
        (["--cluster", "2x2", "--timeout-s", "0"], "--timeout-s must be a positive number"),
    ],
)
def test_mistakes_end_in_a_reason(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["topology", *arguments]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert not output.out


def test_launchers() -> None:
    meet = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert launched_as({}) is None
    assert launched_as({"RANK": "1", "WORLD_SIZE": "4", **meet}) == Place(1, 4, "a", 1)
    slurm = {"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_JOB_ID": "123456", "SLURM_NODELIST": "n[03-05,9],m"}
    assert launched_as(slurm) == Place(2, 3, "n03", 18456)
    assert launched_as({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    with pytest.raises(LaunchError, match="MASTER_ADDR and MASTER_PORT are not both set"):
        launched_as({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"})
    with pytest.raises(LaunchError, match="must be numbers"):
        launched_as({"RANK": "x", "WORLD_SIZE": "2", **meet})


def test_times_follow_from_measured_links() -> None:
    cluster = Cluster.parse("2x2").with_links({Tier.WORLD: Link(50e6, 1e-4)})
    report = report_of(cluster, gradient_bytes=100e6)
    assert report.to_dict()["links"]["world"]["bandwidth_bytes_per_s"] == 50e6
    assert verdict(report)[0].startswith("Hierarchical sends 1.50 times fewer bytes")
    assert (
        verdict(report_of(Cluster.parse("2x1"), gradient_bytes=1.0))[0]
        == "Hierarchical saves nothing here against flat."
    )


def test_a_report_lists_the_groups_of_a_layout() -> None:
    cluster = Cluster.parse("2x2:cyclic")
    report = report_of(cluster, gradient_bytes=1.0, layout=Layout.place(cluster, Axes(dp_replicate=2, tp=2)))
    assert [(g.name, g.tier, g.groups) for g in report.groups[-2:]] == [
        ("axis dp_replicate", Tier.WORLD, ((0, 1), (2, 3))),
        ("axis tp", Tier.HOST, ((0, 2), (1, 3))),
    ]


def test_under_torchrun(tmp_path: Path) -> None:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    topology = [
        "lightning_dist.cli",
        "topology",
        "--json",
        "--probe",
        "--cache-dir",
        str(tmp_path),
        "--timeout-s",
        "60",
    ]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "-m", *topology],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HIERDIST_HOST": "desk"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)  # once: rank 0 alone prints
    assert [(host["host"], host["ranks"], host["identity_from"]) for host in values["hosts"]] == [
        ("desk", [0, 1], "HIERDIST_HOST")
    ]
    assert values["links"]["host"]["bandwidth_bytes_per_s"] > 0


def test_a_meeting_point_that_nobody_keeps_ends_by_the_deadline(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        port = str(taken.getsockname()[1])
        place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        assert main(["topology", "--timeout-s", "1"]) == 2
    assert f"rank 1 of 2 did not meet the others at 127.0.0.1:{port} within 1 s" in capsys.readouterr().err
