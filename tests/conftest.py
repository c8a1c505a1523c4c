"""Fixtures all tests share, and the checks that no test leaves anything behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.support.browser import why_no_browser
from tests.support.cluster import NamespaceCluster, namespaces_of, why_unavailable
from tests.support.forkserver import ForkServer
from tests.support.leaks import Exempt, Snapshot, python_keeps
from tests.support.placement import HostRanks, Placement
from tests.support.processes import SESSION_VARIABLE, describe, kill_all, marked_processes
from tests.support.ranks import RankPool

# What a marked test needs, why it is not there, and the variable that forbids to skip the test.
NEEDS: dict[str, tuple[Callable[[], str | None], str]] = {
    "multihost": (why_unavailable, "HIERDIST_REQUIRE_MULTIHOST"),
    "browser": (why_no_browser, "HIERDIST_REQUIRE_BROWSER"),
}
MULTIHOST_FOLDER = Path(__file__).parent / "multihost"
_PROBLEMS_OUTPUT = "session_problems"  # key of what a lane tells the process that started the lanes

# The machine may be busy: how long an example takes says nothing.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

_session_problems = pytest.StashKey[list[str]]()
_session_mark = pytest.StashKey[str]()
_shared = pytest.StashKey["list[ForkServer | RankPool]"]()


def pytest_configure(config: pytest.Config) -> None:
    """Mark this session's processes, so that those it leaves are found at its end."""
    mark = f"{os.getpid()}-{os.urandom(4).hex()}"
    os.environ[SESSION_VARIABLE] = mark
    config.stash[_session_mark] = mark
    config.stash[_session_problems] = []
    config.stash[_shared] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything under ``multihost/`` needs several hosts; names are the same in every process, as lanes need them."""
    for item in items:
        if MULTIHOST_FOLDER in item.path.parents:
            item.add_marker(pytest.mark.multihost)
    unnamed = [item.nodeid for item in items if " at 0x" in item.name]
    if unnamed:
        raise pytest.UsageError(f"an object's address is in the name of {unnamed[0]}; give its parameters ids")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot do, or fail where it is required."""
    for marker, (why_not, required) in NEEDS.items():
        reason = why_not() if item.get_closest_marker(marker) is not None else None
        if reason is not None and os.environ.get(required) == "1":
            pytest.fail(f"{reason}, and {required}=1 forbids to skip", pytrace=False)
        elif reason is not None:
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test: threads, children, descriptors, variables, stray files, namespaces are those of before."""
    stash = request.config.stash
    before = Snapshot.take()
    namespaces = set(namespaces_of(os.getpid()))

    def exempt() -> Exempt:
        return sum((shared.exempt for shared in stash[_shared]), Exempt())

    yield
    leaks = before.leaks(grace_s=2.0, exempt=exempt, files=True)
    leaks += [f"network namespace {name} is left" for name in namespaces_of(os.getpid()) if name not in namespaces]
    before.restore()
    if leaks:
        pytest.fail("the test left something behind:\n  " + "\n  ".join(leaks), pytrace=False)


@pytest.fixture(scope="session")
def rank_server(pytestconfig: pytest.Config) -> Iterator[ForkServer]:
    """Where ready ranks come from: give it to pools of your own, which then start at once."""
    with ForkServer() as server:
        pytestconfig.stash[_shared].append(server)
        yield server
        pytestconfig.stash[_shared].remove(server)


@pytest.fixture(scope="session")
def ranks(rank_server: ForkServer, pytestconfig: pytest.Config) -> Iterator[RankPool]:
    """The pool of ready ranks on this machine."""
    with RankPool(server=rank_server) as pool:
        pytestconfig.stash[_shared].append(pool)
        yield pool
        pytestconfig.stash[_shared].remove(pool)


@pytest.fixture
def make_cluster() -> Iterator[Callable[..., NamespaceCluster]]:
    """Make clusters, ``make_cluster(2, rate_mbit=200)``, closed after the test; mark the test ``multihost``."""
    with contextlib.ExitStack() as clusters:

        def make(num_hosts: int, *, rate_mbit: float | None = None) -> NamespaceCluster:
            return clusters.enter_context(NamespaceCluster(num_hosts, rate_mbit=rate_mbit))

        yield make


@pytest.fixture
def make_pool(rank_server: ForkServer) -> Callable[..., RankPool]:
    """Make pools of ready ranks on a cluster's hosts, ``make_pool(cluster, placement)``; they end with the cluster."""

    def make(cluster: NamespaceCluster, placement: Placement | HostRanks) -> RankPool:
        return cluster.pool(placement, server=rank_server)

    return make


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """After the last fixture: no process, no namespace of this session is left."""
    problems = session.config.stash[_session_problems]
    lasting = python_keeps().pids
    marked = marked_processes(SESSION_VARIABLE, session.config.stash[_session_mark])
    left = [process for process in marked if process.pid not in lasting]
    problems += [f"process {describe(process)} outlived the session; it is killed now" for process in left]
    kill_all(process.pid for process in left)
    problems += [f"network namespace {name} outlived the session" for name in namespaces_of(os.getpid())]
    os.environ.pop(SESSION_VARIABLE, None)
    if hasattr(session.config, "workeroutput"):  # in a lane, whose status and summary nobody sees
        session.config.workeroutput[_PROBLEMS_OUTPUT] = problems
    if problems and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a lane's session left behind; xdist calls this in the process that started the lanes."""
    node.config.stash[_session_problems] += getattr(node, "workeroutput", {}).get(_PROBLEMS_OUTPUT, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what the session left behind."""
    for problem in config.stash[_session_problems]:
        terminalreporter.write_line(f"LEAK {problem}", red=True)
