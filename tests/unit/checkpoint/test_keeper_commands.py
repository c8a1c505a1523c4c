"""``hierdist checkpoint keepers``: which run on this host, what they hold, and their end.

Other keepers may run here, so each call but one names the folder of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from lightning_dist.checkpoint.keeper import client, messages
from lightning_dist.checkpoint.keeper.client import Keeper
from lightning_dist.checkpoint.keeper.folder import KeptFolder
from lightning_dist.checkpoint.tables import age_text
from lightning_dist.cli import main
from tests.support.keepers import ended, ending_keepers
from tests.support.saves import save_by_ranks


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    """Of the checkpoints in the test's folder: two steps, the newer of an hour and a half ago."""
    job = str(tmp_path)
    with ending_keepers(tmp_path):
        keeper = client.start(client.name_of(job), limit_bytes=64_000_000, job=job, idle_s=60.0)
        for step, age_s in ((7, 9000.0), (12, 5400.0)):
            state = {"a": torch.ones(1000)}
            folder = KeptFolder([keeper], f"{step}.ckpt@x-1")
            save_by_ranks([state], folder, record={"step": step}, created_s=time.time() - age_s)
        keeper.write("13.ckpt@x-2", "rank00000-abc.bin", [b"being written"])
        yield keeper


def printed_row(capsys: pytest.CaptureFixture[str], job: str) -> list[str]:
    lines = [line for line in capsys.readouterr().out.splitlines() if job in line]
    assert len(lines) == 1, lines
    return [cell.strip() for cell in lines[0].strip("│").split("│")]


@pytest.mark.parametrize("is_named", [False, True])
def test_keepers_are_listed(
    keeper: Keeper, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    about = keeper.about()
    with keeper.attach():
        assert main(["checkpoint", "keepers", *([tmp_path.name + "/"] if is_named else [])]) == 0
    row = printed_row(capsys, str(tmp_path))
    used = f"{about['used_bytes'] / 1000:.1f} kB"
    assert row == [str(tmp_path), str(about["process"]), used, "64.0 MB", "1", "12, 7", "1.5 h"]


def test_a_keeper_that_no_run_uses_is_ended(keeper: Keeper, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = psutil.Process(keeper.about()["process"])
    with keeper.attach():
        assert main(["checkpoint", "keepers", str(tmp_path), "--end"]) == 0
        assert f"kept process {process.pid}" in capsys.readouterr().out
        assert keeper.folders()
        assert main(["checkpoint", "keepers", str(tmp_path), "--end", "--force"]) == 0
    assert f"ended process {process.pid}, which keeps" in capsys.readouterr().out
    ended(process)
    assert main(["checkpoint", "keepers", str(tmp_path), "--end"]) == 0
    assert capsys.readouterr().out == f"no keeper runs on this host for {tmp_path}\n"
    assert main(["checkpoint", "keepers", "--force"]) == 2
    assert "write hierdist checkpoint keepers --end --force" in capsys.readouterr().err


def test_names_are_those_of_one_user() -> None:
    lines = ["Num RefCount Protocol Flags Type St Inode Path", "0: 2 0 10000 1 01 30"]
    lines += [f"0: 2 0 10000 1 01 31 @hierdist-keeper-{user}-{name}" for user, name in ((5, "b"), (5, "a"), (55, "c"))]
    lines += [lines[-2], "0: 2 0 10000 1 01 32 /run/hierdist-keeper-5-d"]
    assert messages.names_in("\n".join(lines), 5) == ["a", "b"]


def test_ages_have_units() -> None:
    ages = [age_text(seconds) for seconds in (-1.0, 4.2, 59.9, 60, 5400, 86400 * 3)]
    assert ages == ["0 s", "4 s", "60 s", "1.0 min", "1.5 h", "3.0 d"]
