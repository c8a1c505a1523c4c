"""Folders of agents: whose is whose, and what becomes of those that nobody uses any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lightning_dist.elastic.agent.folder import AgentFolder, remove_abandoned

KILLED = """
import os, signal
from lightning_dist.elastic.agent.folder import AgentFolder
print(AgentFolder(1).path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_the_folder_of_an_agent_that_was_killed_is_removed_and_no_other(temporary: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=120)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    abandoned = Path(ended.stdout.strip())
    assert abandoned.parent == temporary
    assert (abandoned / "board").exists()
    of_another_release = temporary / "hierdist-agent-old"
    of_another_release.mkdir()
    (temporary / "hierdist-agent-link").symlink_to(abandoned)
    with AgentFolder(1) as own, AgentFolder(1) as beside:
        assert remove_abandoned() == [abandoned]
        assert not abandoned.exists()
        assert remove_abandoned() == []
        assert sorted(path.name for path in temporary.iterdir()) == sorted(
            [own.path.name, beside.path.name, of_another_release.name, "hierdist-agent-link"]
        )
    assert not own.path.exists()


def test_an_agent_that_has_ended_leaves_no_descriptor(temporary: Path) -> None:
    before = os.listdir("/proc/self/fd")
    folder = AgentFolder(2)
    folder.close()
    folder.close()
    assert os.listdir("/proc/self/fd") == before
    assert list(temporary.iterdir()) == []
