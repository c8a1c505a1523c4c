"""Bytes on each host's link, counted by the kernel, against the formulas.

On the link a payload comes with the headers of full TCP packets (:func:`lightning_dist.laws.tcp_wire_bytes`: 1.046
bytes a byte), less where the kernel hands over segments of up to 64 KB with one header. Acknowledgements without data
are not counted, and data that a busy machine sends again counts to one side (:class:`tests.multihost.traffic.Sent`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_dist.comm.codecs import codec_of
from lightning_dist.config import SyncConfig
from lightning_dist.laws import flat_bytes_per_host, hierarchical_bytes_per_host
from tests.multihost.traffic import Sent, Traffic, assert_sent, count_sum, values_of
from tests.support.cluster import NamespaceCluster
from tests.support.ranks import RankPool

Layout = dict[str, list[int]]
LAYOUTS: dict[str, Layout] = {
    "2x2": {"a": [0, 1], "b": [2, 3]},
    "2x2 cyclic": {"a": [0, 2], "b": [1, 3]},
    "3+1": {"a": [0, 1, 2], "b": [3]},
    "2x4": {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7]},
    "4x2": {"a": [0, 1], "b": [2, 3], "c": [4, 5], "d": [6, 7]},
}
NUMEL = 1_000_003  # 4 MB, and no number of ranks divides it
SIZE_BYTES = 4 * NUMEL

INSIDE_BESIDE = 0.06
"""Over sockets of one host: acknowledgements, which are counted there, barriers, the headers of messages of Gloo."""

Count = Callable[[str, dict[str, Any]], dict[str, Sent]]


@pytest.fixture
def count(make_cluster: Callable[..., NamespaceCluster], make_pool: Callable[..., RankPool]) -> Count:
    """Sum once in a layout; check the result on all ranks; bytes sent by each host."""

    def run(name: str, sync: dict[str, Any]) -> dict[str, Sent]:
        layout = LAYOUTS[name]
        cluster = make_cluster(len(layout), rate_mbit=400)
        seen: list[Traffic] = make_pool(cluster, layout).run(count_sum, args=(NUMEL, sync), deadline_s=60)
        expected = torch.stack([values_of(rank, NUMEL) for rank in range(len(seen))]).sum(0)
        for traffic in seen:
            assert torch.equal(traffic.result, expected)
        return {traffic.host: traffic.sent for traffic in seen}

    return run


def assert_each_sent(sent: dict[str, Sent], payload_bytes: float) -> None:
    for of_host in sent.values():
        assert_sent(of_host, payload_bytes)


@pytest.mark.parametrize("name", LAYOUTS)
def test_hierarchical_sends_the_least_in_any_placement(count: Count, name: str) -> None:
    sent = count(name, {"chunk_bytes": 1 << 20})
    assert_each_sent(sent, hierarchical_bytes_per_host(SIZE_BYTES, len(LAYOUTS[name])))


def test_sockets_inside_a_host_leave_the_link_alone(count: Count) -> None:
    sent = count("2x2 cyclic", {"chunk_bytes": 1 << 20, "shared_memory": "off"})
    assert_each_sent(sent, hierarchical_bytes_per_host(SIZE_BYTES, 2))


@pytest.mark.parametrize("name", ["2x2 cyclic", "4x2"])
def test_bf16_on_the_wire_halves_the_bytes(count: Count, name: str) -> None:
    sent = count(name, {"chunk_bytes": 1 << 20, "codec": "bf16"})
    assert_each_sent(sent, hierarchical_bytes_per_host(SIZE_BYTES, len(LAYOUTS[name])) / 2)


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("2x2 cyclic", "int8"),
        ("3+1", "topk"),
        ("4x2", "onebit"),
        pytest.param("4x2", "topk", marks=pytest.mark.sweep),
        pytest.param("4x2", "int8", marks=pytest.mark.sweep),
        pytest.param("2x2", "onebit", marks=pytest.mark.sweep),
    ],
)
def test_codecs_send_what_they_claim(
    make_cluster: Callable[..., NamespaceCluster], make_pool: Callable[..., RankPool], name: str, codec: str
) -> None:
    layout = LAYOUTS[name]
    cluster = make_cluster(len(layout), rate_mbit=400)
    numel = NUMEL if len(layout) == 2 else 2 * NUMEL  # a bucket as it comes by default
    seen: list[Traffic] = make_pool(cluster, layout).run(count_sum, args=(numel, {"codec": codec}), deadline_s=60)
    assert all(torch.equal(traffic.result, seen[0].result) for traffic in seen)
    scheme = codec_of(SyncConfig(codec=codec))
    assert scheme is not None
    payload = hierarchical_bytes_per_host(scheme.encoded_bytes(numel), len(layout))
    assert_each_sent({traffic.host: traffic.sent for traffic in seen}, payload)


@pytest.mark.parametrize("codec", ["int8", pytest.param("onebit", marks=pytest.mark.sweep)])
def test_everywhere_counts_inside_hosts_too(
    make_cluster: Callable[..., NamespaceCluster], make_pool: Callable[..., RankPool], codec: str
) -> None:
    """What two ranks of a host send each other: half of the values each, up and down."""
    layout, numel, sync = LAYOUTS["2x2"], 4 * NUMEL, {"codec": codec, "everywhere": True, "chunk_bytes": 4 << 20}
    seen: list[Traffic] = make_pool(make_cluster(2, rate_mbit=400), layout).run(
        count_sum, args=(numel, sync), deadline_s=60
    )
    assert all(torch.equal(traffic.result, seen[0].result) for traffic in seen)
    scheme = codec_of(SyncConfig(codec=codec))
    assert scheme is not None
    encoded_bytes = scheme.encoded_bytes(numel)
    assert_each_sent(
        {traffic.host: traffic.sent for traffic in seen}, hierarchical_bytes_per_host(encoded_bytes, len(layout))
    )
    for traffic in seen:
        print(f"in {traffic.host}: {traffic.inside_bytes / (2 * encoded_bytes):.3f} x formula")
        assert 2 * encoded_bytes <= traffic.inside_bytes <= 2 * encoded_bytes * (1 + INSIDE_BESIDE)


@pytest.mark.parametrize(("name", "leaving_edges"), [("2x2", 1), ("2x2 cyclic", 2)])
def test_a_flat_ring_sends_what_its_formula_says(count: Count, name: str, leaving_edges: int) -> None:
    sent = count(name, {"algorithm": "flat"})
    assert_each_sent(sent, flat_bytes_per_host(SIZE_BYTES, 4, leaving_edges=leaving_edges))
