"""The example over two hosts, launched on each as a user does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cluster import NamespaceCluster
from tests.support.processes import REPO_ROOT

OVERRIDES = [
    "model=gpt-tiny",
    "trainer=debug",
    "trainer.devices=2",
    "trainer.num_nodes=2",
    "trainer.detect_anomaly=false",
    "sample_bytes=8",
    "name=two_hosts",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        *("ddp", "pipeline"),  # of two stages on each host
        pytest.param("pipeline parallel.pipeline.size=4", marks=pytest.mark.sweep),
        *(pytest.param(mode, marks=pytest.mark.sweep) for mode in ("zero1", "zero2", "zero3", "hsdp", "tensor")),
    ],
)
def test_it_trains_on_two_hosts_of_two_ranks(
    make_cluster: Callable[..., NamespaceCluster], tmp_path: Path, parallel: str
) -> None:
    cluster = make_cluster(2, rate_mbit=400)
    sent_before = cluster.tx_bytes()
    command = [REPO_ROOT / "examples" / "train.py", *OVERRIDES, *f"parallel={parallel}".split()]
    with cluster.start_on_hosts(command, cwd=tmp_path, env={"COLUMNS": "200"}) as hosts:
        first, second = hosts.wait(deadline_s=100)
        first.check()
        second.check()
        assert hosts.survivors(within_s=5) == []
    assert re.search(r"ranks\s*│\s*4 ", first.stdout)
    assert re.search(r"steps\s*│\s*3 ", first.stdout)
    assert "bits per byte" in first.stdout
    assert "bits per byte" not in second.stdout, "only rank 0 reports"
    sent = {name: after - sent_before[name] for name, after in cluster.tx_bytes().items()}
    least = 20_000 if "size=4" in parallel else 100_000  # activations of a small model, or its gradients
    assert all(count > least for count in sent.values()), "what has to crossed the link"
