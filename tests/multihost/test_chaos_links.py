"""Links that are cut and slowed on purpose: what passes meanwhile, and that all is as before afterwards."""

from __future__ import annotations

import select
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from lightning_dist.elastic.chaos.host import links
from lightning_dist.elastic.chaos.host.refusal import Refused
from tests.support.cluster import Host, NamespaceCluster, in_namespace

LAST = b"last"
DEADLINE_S = 30.0


def udp(host: Host) -> socket.socket:
    def open_socket() -> socket.socket:
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        opened.bind((host.address, 0))
        opened.settimeout(DEADLINE_S)
        return opened

    return in_namespace(host.netns, open_socket)


def received(sender: socket.socket, receiver: socket.socket) -> list[bytes]:
    """Everything that has come by the time that one more, sent now, has."""
    sender.sendto(LAST, receiver.getsockname())
    found = []
    while (data := receiver.recv(100)) != LAST:
        found.append(data)
    return found


@pytest.mark.parametrize("direction", ["out", "in", "both"])
def test_a_cut_link_passes_nothing_that_way_and_then_all(
    make_cluster: Callable[..., NamespaceCluster], direction: str
) -> None:
    cluster = make_cluster(2)
    before = {name: state(host) for name, host in cluster.hosts.items()}
    with udp(cluster["a"]) as a, udp(cluster["b"]) as b:
        assert received(a, b) == received(b, a) == []  # and both know each other's hardware address
        undo = in_namespace(cluster["a"].netns, lambda: links.cut("eth0", direction))
        a.sendto(b"out", b.getsockname())
        b.sendto(b"in", a.getsockname())
        in_namespace(cluster["a"].netns, undo)
        assert received(a, b) == ([b"out"] if direction == "in" else [])
        assert received(b, a) == ([b"in"] if direction == "out" else [])
    assert {name: state(host) for name, host in cluster.hosts.items()} == before


def test_a_connection_that_is_open_is_cut_too_and_goes_on(make_cluster: Callable[..., NamespaceCluster]) -> None:
    cluster = make_cluster(2)
    listening = in_namespace(cluster["b"].netns, lambda: socket.create_server((cluster["b"].address, 0)))
    with (
        listening,
        in_namespace(cluster["a"].netns, lambda: socket.create_connection(listening.getsockname())) as near,
        listening.accept()[0] as far,
    ):
        far.settimeout(DEADLINE_S)
        near.sendall(b"1")
        assert far.recv(10) == b"1"
        undo = in_namespace(cluster["b"].netns, lambda: links.cut("eth0", "in"))
        sent_again = cluster["a"].retransmits()
        near.sendall(b"2")
        end = time.monotonic() + DEADLINE_S
        while cluster["a"].retransmits() == sent_again:  # it has not come, or its answer has not
            assert time.monotonic() < end
        assert select.select([far], [], [], 0)[0] == []
        in_namespace(cluster["b"].netns, undo)
        assert far.recv(10) == b"2"


@pytest.mark.parametrize("rate_mbit", [None, 200.0])
def test_a_slow_link_gets_its_rate_back(make_cluster: Callable[..., NamespaceCluster], rate_mbit: float | None) -> None:
    host = make_cluster(1, rate_mbit=rate_mbit)["a"]
    before = state(host)
    undo = in_namespace(host.netns, lambda: links.slow("eth0", 3.0))
    assert "tbf" in state(host)
    assert "rate 3Mbit" in state(host)
    in_namespace(host.netns, undo)
    assert state(host) == before


def test_a_discipline_that_could_not_be_put_back_is_left_alone(make_cluster: Callable[..., NamespaceCluster]) -> None:
    host = make_cluster(1)["a"]
    shown("tc", "-n", host.netns, "qdisc", "replace", "dev", "eth0", "root", "pfifo", "limit", "7")
    before = state(host)
    for act in (lambda: links.slow("eth0", 3.0), lambda: links.cut("eth0", "both")):
        with pytest.raises(Refused, match="pfifo, which could not be put back"):
            in_namespace(host.netns, act)
    assert state(host) == before


def state(host: Host) -> str:
    """Queueing discipline, without the number that each new one gets, and routing rules."""
    queues = [
        words
        for line in shown("tc", "-n", host.netns, "qdisc", "show", "dev", "eth0").splitlines()
        if (words := line.split())
    ]
    rules = [shown("ip", "-n", host.netns, family, "rule", "show") for family in ("-4", "-6")]
    return "\n".join([" ".join([*words[:2], *words[3:]]) for words in queues] + rules)


def shown(*command: Any) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
