"""The leak checks find what a test leaves, and nothing else."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from tests.support.fresh import FreshRanks, FreshResult, run_script
from tests.support.leaks import Exempt, Snapshot
from tests.support.processes import REPO_ROOT


@pytest.fixture
def empty_cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _thread() -> tuple[str, Callable[[], None]]:
    event = threading.Event()
    thread = threading.Thread(target=event.wait, name="forgotten")
    thread.start()

    def end() -> None:
        event.set()
        thread.join()

    return "thread 'forgotten' still runs", end


def _child() -> tuple[str, Callable[[], None]]:
    process = subprocess.Popen(["sleep", "1000"])

    def end() -> None:
        process.kill()
        process.wait()

    return "sleep 1000 is left; end it", end


def _zombie() -> tuple[str, Callable[[], None]]:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return "is left; wait for it", lambda: [process.wait()].clear()


def _descriptor() -> tuple[str, Callable[[], None]]:
    reading, writing = os.pipe()
    return "-> pipe:", lambda: (os.close(reading), os.close(writing))[0]


def _variable() -> tuple[str, Callable[[], None]]:
    os.environ["LEFT_BY_A_TEST"] = "1"
    return "LEFT_BY_A_TEST was None, is '1'; use monkeypatch.setenv", lambda: os.environ.__delitem__("LEFT_BY_A_TEST")


def _directory() -> tuple[str, Callable[[], None]]:
    cwd = os.getcwd()
    os.chdir("/")
    return "use monkeypatch.chdir", lambda: os.chdir(cwd)


def _stray_file() -> tuple[str, Callable[[], None]]:
    path = Path("stray.txt")
    path.touch()
    return "stray.txt appeared in", path.unlink


def _shared_memory() -> tuple[str, Callable[[], None]]:
    segment = shared_memory.SharedMemory(create=True, size=64)
    segment.close()
    return f"/dev/shm/{segment.name.lstrip('/')} is left; unlink it", segment.unlink


@pytest.mark.parametrize(
    "leak", [_thread, _child, _zombie, _descriptor, _variable, _directory, _stray_file, _shared_memory]
)
def test_each_kind_of_leak_is_found(empty_cwd: Path, leak: Callable[[], tuple[str, Callable[[], None]]]) -> None:
    before = Snapshot.take()
    shown, undo = leak()
    try:
        found = before.leaks(grace_s=0.0, files=True)
        assert any(shown in sentence for sentence in found), found
    finally:
        undo()
    assert before.leaks(grace_s=2.0, files=True) == []


def test_what_ends_within_the_grace_is_no_leak() -> None:
    before = Snapshot.take()
    reached = threading.Event()
    thread = threading.Thread(target=reached.wait, args=(0.2,))
    thread.start()
    assert before.leaks(grace_s=10.0) == []


def test_what_is_exempt_is_no_leak() -> None:
    before = Snapshot.take()
    reading, writing = os.pipe()
    try:
        assert before.leaks(grace_s=0.0, exempt=lambda: Exempt(descriptors=[reading, writing])) == []
    finally:
        os.close(reading)
        os.close(writing)


STRANGERS = {
    "open": "file = open(path, 'w')",
    # as the C library makes a semaphore
    "mapped under another name": (
        "file = open(path + '-first', 'w+b')\nfile.truncate(32)\nmapped = mmap.mmap(file.fileno(), 32)\nfile.close()\n"
        "os.link(path + '-first', path)\nos.unlink(path + '-first')"
    ),
}


@pytest.mark.parametrize("use", STRANGERS.values(), ids=STRANGERS)
def test_shared_memory_that_a_stranger_uses_is_not_ours(use: str) -> None:
    before = Snapshot.take()
    path = Path("/dev/shm", f"stranger-{os.getpid()}")
    # a grandchild whose parent is gone does not descend from this process
    script = (
        f"import mmap, os, signal\npath = {str(path)!r}\n{use}\n"
        "if os.fork() == 0:\n    print('used', flush=True)\n    signal.pause()"
    )
    try:
        with FreshRanks.local(["-c", script], world_size=1) as ranks:
            ranks.wait_for_output(0, "used", deadline_s=30)
            ranks.wait(deadline_s=30)
            assert path.exists()
            assert not any(str(path) in leak for leak in before.leaks(grace_s=0.0, files=True))
        assert any(str(path) in leak for leak in before.leaks(grace_s=0.0, files=True))
    finally:
        path.unlink(missing_ok=True)


def run_pytest(test_file: Path, *more: str, env: dict[str, str] | None = None) -> FreshResult:
    options = [*more, "-c", str(REPO_ROOT / "pytest.ini"), "--rootdir", str(test_file.parent), "-p", "no:cacheprovider"]
    return run_script(["-m", "pytest", "-p", "tests.conftest", *options, str(test_file)], env=env)


@pytest.mark.parametrize("lanes", [0, 1])
def test_the_session_fails_a_leaking_test_and_a_leaking_session(tmp_path: Path, lanes: int) -> None:
    test_file = tmp_path / "test_leaking.py"
    test_file.write_text(
        "import os, subprocess\n"
        "def test_leaks_a_variable():\n    os.environ['LEFT'] = '1'\n"
        "def test_is_not_blamed_for_it():\n    assert 'LEFT' not in os.environ\n"
        "def test_orphan():\n"
        "    subprocess.run(['sh', '-c', 'sleep 1000 > /dev/null 2>&1 &'], check=True)\n"
    )
    result = run_pytest(test_file, f"-n{lanes}", "--dist=worksteal")
    assert result.returncode == 1, result.output
    assert "3 passed, 1 error" in result.stdout, result.output
    assert "LEFT was None, is '1'" in result.stdout
    assert "LEAK process" in result.stdout
    assert "sleep 1000" in result.stdout
    assert result.survivors == ()


def test_multihost_tests_are_skipped_with_the_reason_or_fail_where_required(tmp_path: Path) -> None:
    test_file = tmp_path / "test_hosts.py"
    test_file.write_text("import pytest\n@pytest.mark.multihost\ndef test_hosts():\n    pass\n")
    without_iproute2 = {"PATH": str(tmp_path)}
    skipped = run_pytest(test_file, env=without_iproute2)
    assert "1 skipped" in skipped.stdout, skipped.output
    assert "network namespaces need" in skipped.stdout
    failed = run_pytest(test_file, env={**without_iproute2, "HIERDIST_REQUIRE_MULTIHOST": "1"})
    assert failed.returncode == 1
    assert "HIERDIST_REQUIRE_MULTIHOST=1 forbids to skip" in failed.stdout, failed.output
