"""The check of a host, run for real in its own process, and what is made of its figures."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_dist import wire
from lightning_dist.elastic.health import compute, memory
from lightning_dist.elastic.health.carried import carried
from lightning_dist.elastic.health.checkup import checkup
from lightning_dist.elastic.health.compute import check_compute
from lightning_dist.elastic.health.findings import beside_earlier, beside_others, best_of
from lightning_dist.elastic.health.kept import figures_file, keep_figures, known_figures
from lightning_dist.elastic.health.limits import HealthLimits
from lightning_dist.elastic.health.link import _CONNECTIONS, judged
from lightning_dist.elastic.health.memory import available_bytes, check_memory
from lightning_dist.elastic.health.request import Peer, Request
from lightning_dist.elastic.leading.channel import ROLES
from lightning_dist.elastic.leading.load import MOST_BYTES
from lightning_dist.errors import ConfigError
from tests.support.agents import SECRET, Party

# A busy machine: only what is asked for is to be found.
PATIENT = HealthLimits(deadline_s=60.0, memory_free_bytes=0, disk_free_bytes=0, disk_bytes_per_s=0, link_latency_s=30.0)


def test_a_fit_host_is_fit_and_says_what_was_measured(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        history = tmp_path / "history.json"
        health = checkup(
            folders=[tmp_path / "runs" / "new"], peers=[listening.getsockname()], limits=PATIENT, history=history
        )
    assert health.is_fit, str(health)
    assert {"compute_flops", "memory_free_bytes", "disk_bytes_per_s", "link_latency_s"} <= set(health.figures)
    assert json.loads(history.read_text()) == {"compute_flops": health.figures["compute_flops"]}
    assert not (tmp_path / "runs").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["history.json"]


def test_each_unfit_part_is_found_in_words(tmp_path: Path) -> None:
    unwritable = Path("/proc/sys")  # a folder that nobody makes files in
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        limits = replace(PATIENT, memory_free_bytes=1 << 60, disk_free_bytes=0)
        health = checkup(folders=[unwritable], peers=[bound.getsockname()], limits=limits)
        port = bound.getsockname()[1]
    assert [finding.check for finding in health.findings] == ["memory", "disk", "link"]
    assert f"at least {1 << 40} MiB are needed" in str(health)
    assert "/proc/sys cannot be written" in str(health)
    assert f"127.0.0.1:{port} is not reached" in str(health)


def test_a_folder_without_room_is_found(tmp_path: Path) -> None:
    health = checkup(folders=[tmp_path], limits=replace(PATIENT, disk_free_bytes=1 << 60))
    assert [finding.check for finding in health.findings] == ["disk"]
    assert "MiB of room" in str(health)


def test_a_check_that_hangs_is_named(tmp_path: Path) -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = []
        try:
            for _ in range(3):  # nobody accepts: the next one waits
                connection = socket.socket()
                connection.setblocking(False)
                connection.connect_ex(full.getsockname())
                waiting.append(connection)
            health = checkup(peers=[full.getsockname()], limits=replace(PATIENT, deadline_s=10.0, link_timeout_s=600.0))
        finally:
            for connection in waiting:
                connection.close()
    assert [str(finding) for finding in health.findings] == ["link: it did not end within 10 s"]


def test_a_program_that_does_not_start_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    health = checkup(limits=PATIENT)
    assert [finding.check for finding in health.findings] == ["start"]
    assert not health.is_fit


def test_an_endpoint_where_nobody_is_is_not_missed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        there, nobody = listening.getsockname(), bound.getsockname()
        assert checkup(endpoints=[nobody], limits=PATIENT).figures.keys().isdisjoint({"link_latency_s"})
        assert "link_latency_s" in checkup(endpoints=[nobody, there], limits=PATIENT).figures
        late = checkup(endpoints=[there], limits=replace(PATIENT, link_latency_s=0.0))
    assert [finding.check for finding in late.findings] == ["link"]


def test_an_agent_says_how_much_the_way_to_it_carries_whoever_leads() -> None:
    with Party(2, min_hosts=2, max_hosts=2) as party:
        a = party.agent("a")
        endpoints = [(endpoint.host, endpoint.port) for endpoint in party.endpoints]
        found = checkup(endpoints=endpoints[::-1], secret=SECRET, limits=PATIENT)
        assert found.is_fit, str(found)
        assert found.figures["link_bytes_per_s"] > 0
        stranger = checkup(endpoints=endpoints, secret=b"a secret that nobody shares", limits=PATIENT)
        assert stranger.is_fit
        assert "link_bytes_per_s" not in stranger.figures
        assert "does not know the secret" in stranger.notes[0]
        assert a.said == []


def test_a_way_that_carries_too_little_is_found() -> None:
    """Whoever takes nothing beyond the proof stands for a way on which nothing passes."""
    is_over = threading.Event()

    def take_nothing() -> None:
        for _ in range(_CONNECTIONS + 1):
            connection, _ = listening.accept()
            with connection:
                connection.settimeout(30)
                with contextlib.suppress(ConnectionError):
                    wire.prove(connection, SECRET, ROLES, is_server=True)
                    is_over.wait(30)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=take_nothing)
        thread.start()
        try:
            limits = replace(PATIENT, link_bytes_per_s=1e6, link_tested_bytes=400_000)
            health = checkup(peers=[listening.getsockname()], secret=SECRET, limits=limits)
        finally:
            is_over.set()
            thread.join()
    assert [finding.check for finding in health.findings] == ["link"]
    assert "within 0.4 s each; at least 1000 kB/s are needed" in str(health)


def test_more_than_is_allowed_is_not_sent_back() -> None:
    with Party(min_hosts=2, max_hosts=2) as party:
        party.agent("a")
        peer = Peer(party.endpoints[0].host, party.endpoints[0].port)
        with pytest.raises(ConnectionError):
            carried(peer, SECRET, size_bytes=MOST_BYTES + 1, timeout_s=30)


def test_hosts_that_share_a_folder_are_compared_there(tmp_path: Path) -> None:
    known = {"compute_flops": 1e30}
    keep_figures(figures_file(tmp_path / "health", "b"), known)
    own = figures_file(tmp_path / "health", "rack 1/a")
    health = checkup(limits=PATIENT, history=own)
    assert [finding.check for finding in health.findings] == ["compare"]
    assert "1e+30 in the median of 1 other hosts" in str(health)
    assert known_figures(own).keys() == {"compute_flops"}
    keep_figures(own, known)
    assert "earlier 1e+30" in str(checkup(limits=PATIENT, history=own, others={}))
    assert sorted(path.name for path in (tmp_path / "health").iterdir()) == ["b.json", "rack%201%2Fa.json"]


def test_a_way_is_judged_by_how_long_connections_took() -> None:
    limits = HealthLimits(link_latency_s=0.1, link_lost_share=0.2)
    assert judged([0.02] * 8 + [1.03] * 2, limits) == []
    (lossy,) = judged([0.02] * 7 + [1.03, 3.1, 1.03], limits)
    assert "3 of 10 connections had to be asked for again, at most 20% are allowed" in lossy
    (late,) = judged([0.3] * 10, limits)
    assert late == "answers after 0.150 s, at most 0.1 s are allowed"


def test_a_core_that_computes_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = compute._product_on_this_core

    def wrong(left: np.ndarray, right_factor: np.ndarray, expected: np.ndarray) -> tuple[int, float]:
        broken = expected.copy()
        broken[3, 5] += 1
        return right(left, right_factor, broken)

    monkeypatch.setattr(compute, "_product_on_this_core", wrong)
    outcome = check_compute(Request(limits=replace(PATIENT, compute_s=0.01)))
    assert "computed 1 of 65536 values of a known product wrong" in outcome.findings[0]


def test_memory_that_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory._pattern(1 << 20)[0] == 0
    monkeypatch.setattr(memory, "_pattern", lambda size_bytes: (2, 1e9))
    assert check_memory(Request(limits=PATIENT)).findings == ("2 words of 32 MiB came back changed",)


def test_available_memory_is_the_kernels() -> None:
    assert available_bytes("MemTotal: 10 kB\nMemAvailable:    7 kB\n") == 7 * 1024
    with pytest.raises(ValueError, match="MemAvailable"):
        available_bytes("MemTotal: 10 kB\n")


def test_a_host_is_compared_with_itself_and_others() -> None:
    figures = {"compute_flops": 1e9, "disk_bytes_per_s": 1.0}
    assert beside_earlier(figures, {"compute_flops": 5e9, "disk_bytes_per_s": 1e9}, 5.0) == []
    assert "1e+09, earlier 6e+09" in str(beside_earlier(figures, {"compute_flops": 6e9}, 5.0)[0])
    others = {"a": {"compute_flops": 1e9}, "b": {"compute_flops": 9e9}, "c": {"compute_flops": 8e9}, "d": {}}
    assert "8e+09 in the median of 3 other hosts" in str(beside_others(figures, others, 5.0)[0])
    assert beside_others(figures, {}, 5.0) == []
    assert best_of([{"compute_flops": 1.0}, {"compute_flops": 2.0, "disk_bytes_per_s": 4.0}]) == {"compute_flops": 2.0}


def test_a_request_passes_as_text() -> None:
    request = Request(("/a",), (Peer("10.0.0.1", 29400),), HealthLimits(deadline_s=3.0), SECRET)
    assert Request.from_text(request.to_text()) == request
    assert Request.from_text(Request().to_text()) == Request()
    assert SECRET.decode() not in repr(request)


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"health\.deadline_s=0 seconds"):
        HealthLimits(deadline_s=0)
