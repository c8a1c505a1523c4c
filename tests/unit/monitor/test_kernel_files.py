"""What is read from the kernel's files: real ones, odd ones, and those that are not there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_dist.errors import UnmeasurableError
from lightning_dist.monitor.sampling.cpu import CpuSource, cpu_seconds
from lightning_dist.monitor.sampling.memory import MemorySource, resident_bytes
from lightning_dist.monitor.sampling.network import NetworkSource, Traffic, interface_traffic
from lightning_dist.monitor.sampling.processes import RankProcesses
from lightning_dist.monitor.sampling.rates import Rates
from lightning_dist.monitor.sampling.rdma import RdmaSource, rdma_counts
from lightning_dist.monitor.sampling.reads import ReadSource, characters_read
from lightning_dist.monitor.sampling.tcp import TcpSource, tcp_counters

SNMP = """\
Ip: Forwarding DefaultTTL InReceives InHdrErrors
Ip: 2 64 83536109 0
IcmpMsg: InType3 OutType3
IcmpMsg: 7 1
Tcp: RtoAlgorithm RtoMin RtoMax MaxConn ActiveOpens PassiveOpens AttemptFails EstabResets CurrEstab InSegs OutSegs \
RetransSegs InErrs OutRsts InCsumErrors
Tcp: 1 200 120000 -1 450207 448182 1679 5390 14 83425340 83255533 74155 0 5630 0
Udp: InDatagrams NoPorts InErrors OutDatagrams RcvbufErrors SndbufErrors InCsumErrors IgnoredMulti MemErrors
Udp: 110756 1 0 110978 0 0 0 0 0
"""
DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 1154120817621 83161970    0    0    0     0          0         0 1154120817621 83161970    0    0    0     0       0          0
  eth0:9609655671  375453    0    0    0     0          0         0 25145872  277941    0    0    0     0       0          0
eth0:1:     100       1    0    0    0     0          0         0      200       2    0    0    0     0       0          0
 bond0: 7 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0
torn0: 1 2
"""  # noqa: E501  # as the kernel writes it
# A name with spaces and parentheses, as any program may give itself.
STAT = b"4711 (my (odd) prog) 2) S 1 4711 4711 0 -1 4194560 5 7 0 0 250 50 30 20 20 0 9 0 100 1 2 3"
IO = b"rchar: 1685879\nwchar: 1738\nsyscr: 715\nsyscw: 30\nread_bytes: 0\nwrite_bytes: 0\ncancelled_write_bytes: 0\n"
SECOND = 10**9


def test_tcp_counters_are_told_by_their_names() -> None:
    counters = tcp_counters(SNMP)
    assert counters["RetransSegs"] == 74155
    assert counters["OutSegs"] == 83255533
    assert counters["MaxConn"] == -1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "0 lines of TCP"),
        ("Tcp: OutSegs RetransSegs\n", "1 lines of TCP"),
        ("Tcp: OutSegs InErrs\nTcp: 1 2\n", "no RetransSegs"),
    ],
)
def test_tcp_counters_that_are_not_there_are_said(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        tcp_counters(text)


def test_retransmits_a_second_and_a_step(tmp_path: Path) -> None:
    snmp, steps = tmp_path / "snmp", 10

    def write(out: int, again: int) -> None:
        snmp.write_text(f"Tcp: OutSegs RetransSegs\nTcp: {out} {again}\n")

    write(1000, 5)
    source = TcpSource(lambda: steps, path=str(snmp))
    assert source.read(0) == []
    write(1600, 11)
    assert {r.metric: r.value for r in source.read(2 * SECOND)} == {"tcp_retransmits": 3.0, "tcp_sent_segments": 300.0}
    steps = 14
    write(1600, 17)
    assert {r.metric: r.value for r in source.read(3 * SECOND)} == {
        "tcp_retransmits": 6.0,
        "tcp_sent_segments": 0.0,
        "tcp_retransmits_per_step": 3.0,  # those of the second without a step are not lost
    }


def test_interfaces_are_told_by_their_names_and_the_loopback_is_none() -> None:
    assert interface_traffic(DEV) == {
        "eth0": Traffic(9609655671, 25145872),
        "eth0:1": Traffic(100, 200),
        "bond0": Traffic(7, 9),
    }


def _interface(sys: Path, name: str, *, index: int, physical: bool, speed: str = "25000", state: str = "up") -> None:
    folder = sys / name
    folder.mkdir(parents=True)
    (folder / "ifindex").write_text(f"{index}\n")
    (folder / "operstate").write_text(f"{state}\n")
    (folder / "speed").write_text(f"{speed}\n")
    if physical:
        (folder / "device").mkdir()


def _dev(path: Path, **sent: int) -> None:
    rows = [f"{name}: {bytes_ // 2} 1 0 0 0 0 0 0 {bytes_} 1 0 0 0 0 0 0" for name, bytes_ in sent.items()]
    path.write_text("\n".join(["head", "head", *rows]) + "\n")


def test_what_goes_over_a_bond_is_counted_once(tmp_path: Path) -> None:
    dev, sys = tmp_path / "dev", tmp_path / "sys"
    indices = {"bond0": 1, "eth0": 2, "eth1": 3}
    for name, index in indices.items():
        _interface(sys, name, index=index, physical=name != "bond0", speed="50000" if name == "bond0" else "25000")
    _dev(dev, bond0=400, eth0=100, eth1=300)
    source = NetworkSource(path=str(dev), sys=sys, index_of=indices.__getitem__)
    assert source.facts == {"interfaces": ["eth0", "eth1"], "link_bytes_per_s": 6.25e9}
    assert source.read(0) == []
    _dev(dev, bond0=2400, eth0=1100, eth1=1300)
    assert {r.metric: r.value for r in source.read(SECOND)} == {"network_sent": 2000.0, "network_received": 1000.0}


def test_interfaces_of_another_namespace_do_not_count_as_physical(tmp_path: Path) -> None:
    dev, sys = tmp_path / "dev", tmp_path / "sys"
    _interface(sys, "eth0", index=2, physical=True)  # of the machine; ours has the same name and another number
    _dev(dev, eth0=100, eth1=100)
    source = NetworkSource(path=str(dev), sys=sys, index_of=lambda name: 77)
    assert source.facts == {"interfaces": ["eth0", "eth1"], "link_bytes_per_s": None}


@pytest.mark.parametrize(("speed", "state"), [("-1", "up"), ("25000", "down"), ("", "up")])
def test_an_unknown_speed_is_none(tmp_path: Path, speed: str, state: str) -> None:
    dev, sys = tmp_path / "dev", tmp_path / "sys"
    _interface(sys, "eth0", index=2, physical=True, speed=speed, state=state)
    _dev(dev, eth0=100)
    assert NetworkSource(path=str(dev), sys=sys, index_of=lambda name: 2).facts["link_bytes_per_s"] is None


def test_a_host_with_a_loopback_only_sends_nothing(tmp_path: Path) -> None:
    dev = tmp_path / "dev"
    _dev(dev, lo=100)
    with pytest.raises(UnmeasurableError, match="no network interface but the loopback"):
        NetworkSource(path=str(dev), sys=tmp_path, index_of=lambda name: 1)


def test_cpu_time_counts_children_that_were_waited_for() -> None:
    assert cpu_seconds(STAT, ticks_per_s=100) == 3.5


def test_memory_is_the_second_number() -> None:
    assert resident_bytes(b"1000 300 200 1 0 500 0\n", page_bytes=4096) == 300 * 4096
    (reading,) = MemorySource().read(0)
    assert 1e6 < reading.value < 1e12


def test_bytes_read_are_told_by_their_name() -> None:
    assert characters_read(IO) == 1685879
    with pytest.raises(ValueError, match="no rchar"):
        characters_read(b"wchar: 3\n")


def test_a_counter_that_goes_back_has_no_rate() -> None:
    rates = Rates()
    assert rates.of({"a": 5, "b": 5}, 0) == {}
    assert rates.of({"a": 7, "b": 1}, SECOND) == {"a": 2.0}
    assert rates.of({"b": 3, "c": 9}, 2 * SECOND) == {"b": 2.0}
    assert rates.of({"b": 4, "c": 9}, 2 * SECOND) == {}  # no time has passed


# -- a rank and its readers --------------------------------------------------------------------------------------------


def _start(code: str, **environment: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", f"print(flush=True)\n{code}\nprint(flush=True)\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    _read_line(process)
    return process


def _read_line(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    process.stdout.readline()


def _end(process: subprocess.Popen[str]) -> None:
    with process:
        process.communicate("\n", timeout=20)


def test_other_ranks_that_a_rank_has_launched_are_not_its_own() -> None:
    processes = RankProcesses(environ=lambda: {"LOCAL_RANK": "0"})
    reader, rank = _start("pass", LOCAL_RANK="0"), _start("pass", LOCAL_RANK="1")
    try:
        assert reader.pid in processes.started()
        assert rank.pid not in processes.started()
    finally:
        _end(reader)
        _end(rank)
    assert reader.pid not in processes.started()


READ = "open('/dev/zero', 'rb', buffering=0).read(40_000_000)"
BURN = "import time\nwhile time.process_time() < 0.5: pass"


@pytest.mark.parametrize(
    ("make", "code", "least"), [(ReadSource, READ, 40_000_000), (CpuSource, BURN, 0.5)], ids=["read", "cpu"]
)
def test_what_a_reader_does_counts_once_also_when_it_has_ended(
    make: Callable[[RankProcesses], ReadSource | CpuSource], code: str, least: float
) -> None:
    source = make(RankProcesses(environ=dict))
    source.read(0)
    reader = _start(code)
    try:
        _read_line(reader)  # it is done, and lives
        (alive,) = source.read(SECOND)
    finally:
        _end(reader)
    (ended,) = source.read(2 * SECOND)
    own = least / 2  # of the test's own process and of a start of Python, at most
    assert 0.95 * least <= alive.value < least + own  # the kernel counts CPU time of others in ticks of 10 ms
    assert ended.value < own


# -- RDMA --------------------------------------------------------------------------------------------------------------


def _counters(folder: Path, **values: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name).write_text(f"{value}\n")


def test_rdma_ports_are_added_up(tmp_path: Path) -> None:
    ports = [tmp_path / "mlx5_0" / "ports" / "1", tmp_path / "mlx5_1" / "ports" / "1"]
    for port in ports:
        _counters(port / "hw_counters", packet_seq_err=10, local_ack_timeout_err=1, out_of_sequence=99, lifespan=10)
        _counters(port / "counters", port_xmit_data=1000, port_rcv_data=0, link_downed="N/A (no PMA)")
    source = RdmaSource(sys=tmp_path)
    assert source.read(0) == []
    _counters(ports[0] / "hw_counters", packet_seq_err=14)
    _counters(ports[1] / "hw_counters", local_ack_timeout_err=3)
    _counters(ports[1] / "counters", port_xmit_data=2000)
    assert {r.metric: r.value for r in source.read(2 * SECOND)} == {
        "rdma_retransmits": 3.0,
        "rdma_sent": 2000.0,
        "rdma_received": 0.0,
    }


def test_a_driver_without_counters_of_retransmits_has_none() -> None:
    assert rdma_counts({"tx_pkts": 5}, {}) == {}
    assert rdma_counts({"retrans_pkts": 5}, {}) == {"rdma_retransmits": 5}


def test_a_host_without_rdma_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnmeasurableError, match="no RDMA device"):
        RdmaSource(sys=tmp_path / "none")
    _counters(tmp_path / "siw0" / "ports" / "1" / "counters", port_xmit_data=1)
    with pytest.raises(UnmeasurableError, match="no hw_counters"):
        RdmaSource(sys=tmp_path)
