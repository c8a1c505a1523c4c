"""Locks between processes: held by one, named, gone with their file."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from lightning_dist.data.cache import host_lock
from lightning_dist.data.cache.host_lock import HostLock, held
from lightning_dist.errors import DataCacheError


def test_one_has_it_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    first, second = HostLock(path), HostLock(path)
    assert second.holder() is None
    assert first.try_acquire()
    assert not second.try_acquire()
    holder = second.holder()
    assert holder is not None
    assert holder.pid == os.getpid()
    assert str(holder).startswith(f"process {os.getpid()} (this one) since ")
    first.release()
    first.release()
    assert not path.exists()
    assert second.try_acquire()
    second.release()


def test_a_lock_whose_file_was_removed_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = (HostLock(tmp_path / "x.lock") for _ in range(3))
    assert first.try_acquire()
    true_flock = fcntl.flock

    def slow_flock(descriptor: int, operation: int) -> None:
        if operation != fcntl.LOCK_UN:
            first.release()  # after another has opened the file, and before it locks it
        true_flock(descriptor, operation)

    monkeypatch.setattr(host_lock.fcntl, "flock", slow_flock)
    assert second.try_acquire()
    assert not third.try_acquire()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_for_a_moment_has_a_deadline(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with held(path, wait_s=1.0):
        said = rf"lock has been locked for 0\.05 s by process {os.getpid()} .*is it stopped\?"
        with pytest.raises(DataCacheError, match=said), held(path, wait_s=0.05):
            pass
    assert path.exists()
    with held(path, wait_s=1.0):
        pass


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(host_lock.fcntl, "flock", refuse)
    with pytest.raises(OSError, match="No locks available"):
        HostLock(tmp_path / "x.lock").try_acquire()
