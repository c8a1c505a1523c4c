"""Several hosts on one machine: Linux network namespaces joined by a bridge, each with one link of a given rate.

Usage (needs root and iproute2)::

    with NamespaceCluster(2, rate_mbit=200) as cluster:
        results = cluster.run("script.py", placement={"a": [0, 1], "b": [2, 3]}, deadline_s=60)
        with cluster.pool({"a": [0, 2], "b": [1, 3]}) as pool:
            before = cluster["a"].tx_bytes()
            pool.run(function)
            print(cluster["a"].tx_bytes() - before)

Each host is a namespace with ``lo`` and ``eth0`` (10.77.0.1, .2, ...); the bridge has a namespace of its own. A rate
shapes both ends of a host's link by a token bucket. IPv6 is off, so that only the ranks' traffic is counted. The
machine's host name and boot id are the same on all hosts. Closing kills every process inside and removes the
namespaces; it also happens when the interpreter exits, and namespaces of clusters whose process is gone are removed
when the next one is made.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import shutil
import string
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from tests.support.forkserver import ForkServer
from tests.support.fresh import Argv, Command, FreshRanks, FreshResult
from tests.support.placement import HostRanks, Placement
from tests.support.processes import free_port, kill_all
from tests.support.ranks import HostNetwork, RankPool
from tests.support.tied import NETNS_FOLDER, enter_network

PREFIX = "hierdist-"
ANY_PLACEMENT_HOSTS = string.ascii_lowercase
T = TypeVar("T")

_serials = itertools.count()


class ClusterUnavailable(RuntimeError):
    """This machine cannot make network namespaces; the message says why."""


class Host:
    """One host of a cluster.

    Attributes:
        name: ``a``, ``b``, ...
        netns: Its network namespace.
        address: Its IPv4 address.
    """

    def __init__(self, name: str, netns: str, address: str, *, bridge_netns: str, port: str) -> None:
        self.name = name
        self.netns = netns
        self.address = address
        self._bridge_netns = bridge_netns
        self._port = port

    def tx_bytes(self) -> int:
        """Bytes the host has sent on its link, headers included."""
        return self._interface_counters()[8]

    def rx_bytes(self) -> int:
        """Bytes the host has received on its link, headers included."""
        return self._interface_counters()[0]

    def retransmits(self) -> int:
        """TCP segments the host has sent again."""
        lines = in_namespace(self.netns, lambda: Path("/proc/thread-self/net/snmp").read_text()).splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")])

    def set_link(self, *, up: bool) -> None:
        """Plug the cable in, or pull it: the host keeps its address and sees its carrier come or go."""
        _run("ip", "-n", self._bridge_netns, "link", "set", self._port, "up" if up else "down")

    def set_rate(self, rate_mbit: float | None, *, queue_bytes: int | None = None) -> None:
        """Shape both directions of the link, in Mbit/s; ``None`` takes the limit off.

        Args:
            rate_mbit: The rate.
            queue_bytes: What may wait before the kernel drops; ``None``: what passes in 200 ms.
        """
        # What is larger than a burst is cut into packets before it queues; what is larger than the queue never passes.
        burst = "64kb" if queue_bytes is None else str(min(64_000, queue_bytes))
        queue = ("latency", "200ms") if queue_bytes is None else ("limit", str(queue_bytes))
        for netns, device in ((self.netns, "eth0"), (self._bridge_netns, self._port)):
            if rate_mbit is not None:
                rate = f"{round(rate_mbit * 1000)}kbit"
                shape = ("tbf", "rate", rate, "burst", burst, *queue)
                _run("tc", "-n", netns, "qdisc", "replace", "dev", device, "root", *shape)
            elif "tbf" in _run("tc", "-n", netns, "qdisc", "show", "dev", device):
                _run("tc", "-n", netns, "qdisc", "del", "dev", device, "root")

    def pids(self) -> list[int]:
        """Processes that run on the host."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.netns).split()]

    def free_port(self) -> int:
        """A TCP port nobody on the host has."""
        return in_namespace(self.netns, free_port)

    def _interface_counters(self) -> list[int]:
        text = in_namespace(self.netns, lambda: Path("/proc/thread-self/net/dev").read_text())
        for line in text.splitlines():
            device, _, counters = line.partition(":")
            if device.strip() == "eth0":
                return [int(value) for value in counters.split()]
        raise RuntimeError(f"host {self.name} has no eth0")


class NamespaceCluster:
    """Hosts on one machine.

    Args:
        num_hosts: They are named ``a``, ``b``, ...
        rate_mbit: Rate of each host's link in either direction, in Mbit/s; ``None`` leaves it unshaped.

    Raises:
        ClusterUnavailable: The machine cannot do it.
    """

    def __init__(self, num_hosts: int, *, rate_mbit: float | None = None) -> None:
        if not 1 <= num_hosts <= len(ANY_PLACEMENT_HOSTS):
            raise ValueError(f"num_hosts is between 1 and {len(ANY_PLACEMENT_HOSTS)}, got {num_hosts}")
        reason = why_unavailable()
        if reason is not None:
            raise ClusterUnavailable(reason)
        remove_stale_namespaces()
        stem = f"{PREFIX}{os.getpid()}-{_started(os.getpid())}-{next(_serials)}"
        self._bridge_netns = f"{stem}-bridge"
        self.hosts: dict[str, Host] = {
            name: Host(
                name, f"{stem}-{name}", f"10.77.0.{number}", bridge_netns=self._bridge_netns, port=f"port{number}"
            )
            for number, name in enumerate(ANY_PLACEMENT_HOSTS[:num_hosts], start=1)
        }
        self._inhabitants = contextlib.ExitStack()  # what was started on the hosts
        self._open = True
        atexit.register(self.close)
        try:
            self._build(rate_mbit)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> NamespaceCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getitem__(self, name: str) -> Host:
        if name not in self.hosts:
            raise KeyError(f"no host {name!r}; the hosts are {', '.join(self.hosts)}")
        return self.hosts[name]

    def start(
        self,
        argv: Argv,
        placement: Placement | HostRanks,
        *,
        env: Mapping[str, str] | None = None,
        env_per_rank: Sequence[Mapping[str, str]] | None = None,
        cwd: Path | None = None,
    ) -> FreshRanks:
        """Start one process a rank, with the variables a launcher would set; use it in a ``with`` statement.

        Args:
            argv: A script, or a command line.
            placement: Host -> its ranks: contiguous, cyclic, uneven.
            env: Variables for all ranks.
            env_per_rank: Variables by rank.
            cwd: Working directory; by default a new folder for each rank.
        """
        placement = Placement.of(placement)
        master = self[placement.seats()[0].host]
        common = {"MASTER_ADDR": master.address, "MASTER_PORT": str(master.free_port()), "GLOO_SOCKET_IFNAME": "eth0"}
        commands = []
        for seat in placement.seats():
            own = env_per_rank[seat.rank] if env_per_rank is not None else {}
            environment = {**common, **seat.environment(), **(env or {}), **own}
            commands.append(Command(argv, environment, netns=self[seat.host].netns, cwd=cwd))
        return self._inhabitants.enter_context(FreshRanks(commands))

    def run(
        self,
        argv: Argv,
        placement: Placement | HostRanks,
        *,
        env: Mapping[str, str] | None = None,
        env_per_rank: Sequence[Mapping[str, str]] | None = None,
        cwd: Path | None = None,
        deadline_s: float = 60.0,
    ) -> list[FreshResult]:
        """:meth:`start`, and wait for all ranks; their results, whatever their exit codes.

        Raises:
            RanksFailed: Some did not end by the deadline.
        """
        with self.start(argv, placement, env=env, env_per_rank=env_per_rank, cwd=cwd) as ranks:
            return ranks.wait(deadline_s=deadline_s)

    def start_on_hosts(
        self,
        argv: Argv | Mapping[str, Argv],
        *,
        hosts: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> FreshRanks:
        """Start one process a host, which launches its ranks itself: NODE_RANK and MASTER_* are set, no RANK.

        Args:
            argv: A command line for all hosts, or one for each.
            hosts: Which, in order of NODE_RANK; all, if not given.
            env: Variables for all.
            cwd: Working directory; by default a new folder for each host.
        """
        names = list(self.hosts if hosts is None else hosts)
        master = self[names[0]]
        common = {"MASTER_ADDR": master.address, "MASTER_PORT": str(master.free_port()), "GLOO_SOCKET_IFNAME": "eth0"}
        commands = []
        for node_rank, name in enumerate(names):
            own = argv[name] if isinstance(argv, Mapping) else argv
            environment = {**common, "NODE_RANK": str(node_rank), **(env or {})}
            commands.append(Command(own, environment, netns=self[name].netns, cwd=cwd))
        return self._inhabitants.enter_context(FreshRanks(commands))

    def pool(self, placement: Placement | HostRanks, *, server: ForkServer | None = None) -> RankPool:
        """Ready ranks on the hosts, for several calls in a row; see :class:`RankPool`.

        Args:
            placement: Used by calls that give none.
            server: Where ranks come from; pass the one at hand, a new one takes seconds to start.
        """
        environment = {"GLOO_SOCKET_IFNAME": "eth0"}
        networks = {h.name: HostNetwork(h.netns, h.address, environment) for h in self.hosts.values()}
        return self._inhabitants.enter_context(RankPool(server=server, placement=placement, networks=networks))

    def tx_bytes(self) -> dict[str, int]:
        """Bytes sent so far, by host."""
        return {name: host.tx_bytes() for name, host in self.hosts.items()}

    def set_rate(self, rate_mbit: float | None) -> None:
        """Shape every host's link, in Mbit/s; ``None`` takes the limits off."""
        for host in self.hosts.values():
            host.set_rate(rate_mbit)

    def close(self) -> None:
        """End all that was started on the hosts, kill what is left there, and remove them. Safe twice."""
        if not self._open:
            return
        self._open = False
        atexit.unregister(self.close)
        try:
            self._inhabitants.close()
        finally:
            _remove([*(host.netns for host in self.hosts.values()), self._bridge_netns])

    def _build(self, rate_mbit: float | None) -> None:
        bridge = self._bridge_netns
        for netns in (bridge, *(host.netns for host in self.hosts.values())):
            _run("ip", "netns", "add", netns)
            in_namespace(netns, _disable_ipv6)
        lines = ["link add bridge0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0", "link set bridge0 up"]
        for host in self.hosts.values():
            lines.append(f"link add {host._port} type veth peer name eth0 netns {host.netns}")
            lines.append(f"link set {host._port} master bridge0 up")
        _run("ip", "-n", bridge, "-batch", "-", stdin="\n".join(lines))
        for host in self.hosts.values():
            lines = ["link set lo up", f"addr add {host.address}/24 dev eth0", "link set eth0 up"]
            _run("ip", "-n", host.netns, "-batch", "-", stdin="\n".join(lines))
        if rate_mbit is not None:
            self.set_rate(rate_mbit)


def why_unavailable() -> str | None:
    """Why this machine cannot make namespace clusters; ``None`` if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"network namespaces need iproute2, and {program!r} is not installed"
    return _try_one()


def namespaces_of(pid: int) -> list[str]:
    """Namespaces made by a process."""
    return [name for name in _namespaces() if name.startswith(f"{PREFIX}{pid}-")]


def remove_stale_namespaces() -> list[str]:
    """Remove the namespaces of clusters whose process is gone; their names."""
    stale = []
    for name in _namespaces():
        if name.startswith(PREFIX):
            pid, started = name.removeprefix(PREFIX).split("-")[:2]
            if _started(int(pid)) != started:
                stale.append(name)
    _remove(stale)
    return stale


def in_namespace(netns: str, action: Callable[[], T]) -> T:
    """Do something in a network namespace, in a thread of its own that ends with it."""
    results: list[T] = []
    errors: list[BaseException] = []

    def act() -> None:
        try:
            enter_network(netns)
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=act, name=f"in-{netns}")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@functools.cache
def _try_one() -> str | None:
    name = f"{PREFIX}{os.getpid()}-{_started(os.getpid())}-trial"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "port")
        _run(
            "tc",
            "-n",
            name,
            "qdisc",
            "add",
            "dev",
            "eth0",
            "root",
            "tbf",
            *["rate", "1mbit", "burst", "64kb", "latency", "200ms"],
        )
    except RuntimeError as error:
        return f"network namespaces do not work here: {error}"
    finally:
        if name in _namespaces():
            _run("ip", "netns", "del", name)
    return None


def _disable_ipv6() -> None:
    for name in ("all", "default"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")


def _namespaces() -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return os.listdir(NETNS_FOLDER)
    return []


def _remove(namespaces: Sequence[str]) -> None:
    errors = []
    for name in namespaces:
        if name not in _namespaces():
            continue
        try:
            end = time.monotonic() + 10
            while pids := [int(pid) for pid in _run("ip", "netns", "pids", name).split()]:
                kill_all(pid for pid in pids if pid != os.getpid())
                if time.monotonic() > end:
                    raise RuntimeError(f"processes {pids} in {name} do not die")
            _run("ip", "netns", "del", name)
        except (RuntimeError, TimeoutError) as error:
            if name in _namespaces():  # else another process was quicker
                errors.append(str(error))
    if errors:
        raise RuntimeError("; ".join(errors))


def _started(pid: int) -> str:
    """When a process started, in clock ticks since boot, so that an id used again is told from the first; or empty."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _run(*command: str, stdin: str | None = None) -> str:
    result = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=30, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout
