"""A template: it starts ranks, says how they end, and is started in one of two ways."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_dist.elastic.agent import template
from lightning_dist.elastic.agent.command import Kind, Program
from lightning_dist.elastic.agent.environment import template_environment
from lightning_dist.elastic.agent.start import Start
from lightning_dist.elastic.agent.warm import Ended, TemplateLostError, WarmProcess


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[WarmProcess]:
    with WarmProcess(
        tmp_path / "agent", import_folder=str(tmp_path), environment=template_environment(os.environ), may_fork=True
    ) as process:
        yield process


def start_shell(warm: WarmProcess, script: str, *, key: int = 0, folder: Path | None = None) -> int:
    environment = {"WHO": "rank", "PATH": os.environ["PATH"]}
    start = Start(key, Program(Kind.PROGRAM, "/bin/sh", ("-c", script)), environment, str(folder or "/"))
    return warm.start(start, stdout=1, stderr=2)


def ended(warm: WarmProcess) -> Ended:
    assert select.select([warm], [], [], 30)[0], "nothing has ended"
    (found,) = warm.collect()
    return found


def test_a_rank_has_its_own_variables_folder_and_group(warm: WarmProcess, tmp_path: Path) -> None:
    pid = start_shell(warm, 'echo "$WHO $PWD $(ps -o pgid= -p $$) $$" > said', key=5, folder=tmp_path)
    assert ended(warm) == Ended(5, 0)
    who, folder, group, own = (tmp_path / "said").read_text().split()
    assert (who, folder) == ("rank", str(tmp_path))
    assert int(group) == int(own) == pid


def test_exit_codes_and_signals_are_told(warm: WarmProcess) -> None:
    start_shell(warm, "exit 9")
    assert ended(warm) == Ended(0, 9)
    start_shell(warm, "kill -SEGV $$", key=1)
    assert ended(warm) == Ended(1, -11)
    start_shell(warm, "kill -PIPE $$; exit 3", key=2)  # which Python ignores, and other programs do not
    assert ended(warm) == Ended(2, -13)


def test_a_program_that_cannot_be_run_has_a_shells_exit_code(warm: WarmProcess, tmp_path: Path) -> None:
    (tmp_path / "no-program").write_text("")
    start = Start(0, Program(Kind.PROGRAM, str(tmp_path / "no-program"), ()), {}, "/")
    warm.start(start, stdout=1, stderr=2)
    assert ended(warm) == Ended(0, 126)


def test_what_is_killed_takes_its_ranks_with_it(warm: WarmProcess) -> None:
    start_shell(warm, "sleep 600")
    assert warm._process is not None
    warm._process.kill()
    with pytest.raises(TemplateLostError, match="exit status -9"):
        ended(warm)
    assert not warm.is_alive
    warm.open()  # another one, of which ranks can be forked
    start_shell(warm, "exit 3", key=2)
    assert ended(warm) == Ended(2, 3)


def test_one_that_is_given_up_while_it_lives_leaves_the_folder_to_the_agent(warm: WarmProcess, tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    warm.wait_ready()
    error = warm._lost("did not do a fork within 0 s")
    assert str(error).endswith("(exit status -9)")
    assert (tmp_path / "agent").exists()


def test_one_that_cannot_fork_ranks_makes_room_for_a_new_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent").mkdir()
    process = WarmProcess(
        tmp_path / "agent", import_folder=str(tmp_path), environment=template_environment(os.environ), may_fork=True
    )
    monkeypatch.setattr("torch.cuda._is_in_bad_fork", lambda: os.getpid() != agent)
    agent = os.getpid()
    if template.why_not_forkable() is not None:
        pytest.skip("the process of the tests has threads of its own: it forks no template")
    with process:
        forked = process._process
        process.wait_ready()
        assert process._process is not forked
        start_shell(process, "exit 4")
        assert ended(process) == Ended(0, 4)
