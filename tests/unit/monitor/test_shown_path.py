"""How paths are printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dist.monitor.shown_path import shown_path


def test_a_path_is_shown_as_one_would_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown_path(tmp_path / "monitor") == Path("monitor")
    assert shown_path(tmp_path.parent) == tmp_path.parent


def test_a_working_directory_that_was_removed_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "job"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    assert shown_path(tmp_path / "monitor") == tmp_path / "monitor"
