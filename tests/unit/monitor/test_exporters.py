"""What goes out of a run: means for loggers, a Prometheus endpoint, Parquet."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from lightning_dist.errors import ConfigError
from lightning_dist.monitor.exporters.means import IntervalMeans
from lightning_dist.monitor.exporters.parquet import export_parquet
from lightning_dist.monitor.exporters.prometheus import PrometheusEndpoint
from lightning_dist.monitor.record import METRICS, Phase, RankHeader, Sample
from tests.support.records import STARTED_NS, made_run, made_step
from tests.support.scraping import scraped

HEADER = RankHeader(3, 1, 'a "host"', "cpu", 1, STARTED_NS, 0)


def test_tables_are_whole_or_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_bytes() for path in export_parquet(made_run([0.1] * 3), tmp_path)}
    write_table = pq.write_table

    def breaking(table: Any, path: Path) -> None:
        write_table(table, path)
        if "samples" in path.name:
            path.write_bytes(b"PAR1")
            raise OSError("the disk is full")

    monkeypatch.setattr(pq, "write_table", breaking)
    with pytest.raises(OSError, match="the disk is full"):
        export_parquet(made_run([0.2] * 5), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_means_are_of_the_interval() -> None:
    means = IntervalMeans()
    means.step(made_step(0, 1.0))
    means.step(made_step(1, 3.0, data_wait_s=1.0))
    means.sample(Sample("memory", 0, 0, 4.0))
    means.sample(Sample("memory", 1, 0, 6.0))
    means.sample(Sample("data_wait", 1, 0, 99.0))
    means.sample(Sample("gpu_power", 1, 0, float("nan")))
    taken = means.take()
    assert taken["monitor/step"] == 2.0
    assert taken["monitor/data_wait"] == 0.5
    assert taken["monitor/samples_per_s"] == 16 / 4
    assert taken["monitor/communication_share"] == pytest.approx(0.2)
    assert taken["monitor/exposed_communication_share"] == pytest.approx(0.1)
    assert taken["monitor/memory"] == 5.0
    assert "monitor/gpu_power" not in taken
    assert means.take() == {}


def test_what_is_unknown_has_no_mean() -> None:
    means = IntervalMeans()
    means.step(replace(made_step(0, 1.0), samples=None, communication=None))
    taken = means.take()
    assert not any("samples" in name or "share" in name for name in taken)
    assert "monitor/backward" not in taken


def test_what_is_unknown_in_some_steps_is_the_mean_of_the_others() -> None:
    means = IntervalMeans()
    known = made_step(0, 1.0)
    means.step(known)
    means.step(replace(known, communication=None, phases={**known.phases, Phase.COMMUNICATION: None}))
    taken = means.take()
    assert taken["monitor/communication"] == pytest.approx(0.1)
    assert taken["monitor/communication_share"] == pytest.approx(0.2)
    assert taken["monitor/exposed_communication_share"] == pytest.approx(0.1)


def test_prometheus_serves_sums_and_the_newest() -> None:
    endpoint = PrometheusEndpoint(0)
    endpoint.open(replace(HEADER, facts={"round": 3}))
    try:
        assert endpoint.problem is None
        for i in range(2):
            endpoint.step(made_step(i, 0.5))
        for value in (1.0, 2.0):
            endpoint.sample(Sample("gpu_power", 0, 0, value))
        figures = scraped(f"http://127.0.0.1:{endpoint.port}/metrics")
    finally:
        endpoint.close()
    labels = 'host="a \\"host\\"",rank="3"'
    assert figures[f"hierdist_steps_total{{{labels}}}"] == 2
    assert figures[f"hierdist_step_seconds_total{{{labels}}}"] == 1.0
    assert figures['hierdist_phase_seconds_total{host="a \\"host\\"",phase="forward",rank="3"}'] == pytest.approx(0.9)
    assert figures[f"hierdist_gpu_power_watts{{{labels}}}"] == 2.0
    assert figures[f"hierdist_global_step{{{labels}}}"] == 1
    assert figures[f"hierdist_round{{{labels}}}"] == 3


def test_every_metric_can_be_served() -> None:
    endpoint = PrometheusEndpoint(0)
    endpoint.open(HEADER)
    try:
        for name in METRICS:
            endpoint.sample(Sample(name, 0, 0, 1.0))
        figures = scraped(f"http://127.0.0.1:{endpoint.port}/metrics")
    finally:
        endpoint.close()
    assert len(figures) == len(METRICS)
    names = {name.partition("{")[0] for name in figures}
    assert {"hierdist_read_bytes_per_second", "hierdist_memory_bytes", "hierdist_tcp_retransmits_per_second"} <= names


def test_a_taken_port_is_a_problem_not_an_error() -> None:
    first = PrometheusEndpoint(0)
    first.open(HEADER)
    try:
        second = PrometheusEndpoint(first.port - HEADER.local_rank)
        second.open(HEADER)
        assert second.problem is not None
        assert f"127.0.0.1:{first.port}" in second.problem
        second.step(made_step(0, 1.0))
        second.close()
    finally:
        first.close()


def test_a_package_that_fails_is_a_problem_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases before 0.20 give no server back."""
    monkeypatch.setattr("prometheus_client.start_http_server", lambda *_: None)
    endpoint = PrometheusEndpoint(0)
    endpoint.open(HEADER)
    assert endpoint.problem is not None
    assert "TypeError" in endpoint.problem
    endpoint.close()


def test_the_ports_of_a_host_follow_each_other() -> None:
    probe = PrometheusEndpoint(0)
    probe.open(HEADER)
    free = probe.port
    probe.close()
    endpoint = PrometheusEndpoint(free - 1)
    endpoint.open(HEADER)
    endpoint.close()
    assert endpoint.problem is not None or endpoint.port == free


def test_closing_ends_the_thread() -> None:
    before = set(threading.enumerate())
    endpoint = PrometheusEndpoint(0)
    endpoint.open(HEADER)
    assert set(threading.enumerate()) != before
    endpoint.close()
    endpoint.close()
    assert set(threading.enumerate()) == before


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"lightning-dist\[monitor\]"):
        PrometheusEndpoint(9400)


def test_parquet_has_all_ranks_and_null_for_what_was_not_measured(tmp_path: Path) -> None:
    run = made_run([0.5, 1.0], samples={"memory": [7.0]}, run_id="r1")
    first = replace(run.ranks[0].steps[0], samples=None, communication=None, counters={"data.shared_bytes": 2.0})
    run.ranks[0].__dict__["steps"] = (first, *run.ranks[0].steps[1:])
    paths = export_parquet(run, tmp_path / "tables")
    assert [path.name for path in paths] == ["steps.parquet", "samples.parquet", "spans.parquet"]
    steps, samples, spans = (pq.read_table(path) for path in paths)
    rows = steps.to_pylist()
    assert [(row["rank"], row["step"], row["duration_s"]) for row in rows] == [
        (0, 0, 0.5),
        (0, 1, 1.0),
        (1, 0, 0.5),
        (1, 1, 1.0),
    ]
    assert rows[0]["samples"] is None
    assert rows[0]["communication_total_s"] is None
    assert rows[0]["counters"] == [("data.shared_bytes", 2.0)]
    assert rows[1]["samples"] == 8
    assert rows[1]["wall_ns"] == STARTED_NS + 10**8
    assert rows[1]["forward_s"] == 0.9
    assert rows[1]["backward_s"] is None
    assert rows[1]["tiers"] == [{"tier": "host", "total_s": 0.2, "exposed_s": 0.1, "size_bytes": 1000}]
    assert samples.to_pylist()[0] == {
        "rank": 0,
        "host": "a",
        "step": 0,
        "wall_ns": STARTED_NS,
        "metric": "memory",
        "value": 7.0,
    }
    assert spans.num_rows == 2
    assert json.loads(steps.schema.metadata[b"hierdist"])["run_id"] == "r1"


def test_parquet_of_an_empty_run(tmp_path: Path) -> None:
    assert [pq.read_table(path).num_rows for path in export_parquet(made_run([], ranks=0), tmp_path)] == [0, 0, 0]
