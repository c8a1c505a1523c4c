"""What the words after ``--`` run, and how many hosts take part."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_dist.elastic.agent.command import Kind, Program, other_python, parse_command
from lightning_dist.elastic.agent.options import LaunchOptions, parse_hosts
from lightning_dist.errors import ConfigError, LaunchError


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "train.py"
    path.write_text("")
    monkeypatch.chdir(tmp_path)
    return path


@pytest.mark.parametrize("before", [[], [sys.executable], [sys.executable, "-u"]], ids=["bare", "python", "python -u"])
def test_a_script_is_run_by_this_python(script: Path, before: list[str]) -> None:
    program = parse_command([*before, "train.py", "--lr", "0.1", "--", "-u"])
    assert program == Program(Kind.SCRIPT, "train.py", ("--lr", "0.1", "--", "-u"))
    assert program.import_folder == str(script.parent)
    assert str(program) == "train.py"


@pytest.mark.parametrize("before", [[], [sys.executable]], ids=["bare", "python"])
def test_a_module_is_run_by_this_python(script: Path, before: list[str]) -> None:
    program = parse_command([*before, "-m", "my.train", "-m"])
    assert program == Program(Kind.MODULE, "my.train", ("-m",))
    assert program.import_folder == str(script.parent)


def test_python_with_options_of_its_own_is_a_program() -> None:
    assert parse_command([sys.executable, "-O", "train.py"]) == Program(
        Kind.PROGRAM, sys.executable, ("-O", "train.py")
    )


def test_another_environments_python_is_a_program(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = script.parent / "bin" / "python3"
    other.parent.mkdir()
    other.symlink_to(Path(sys.executable).resolve())
    monkeypatch.setenv("PATH", str(other.parent))
    program = parse_command(["python3", "train.py"])
    assert program == Program(Kind.PROGRAM, str(other), ("train.py",))
    said = other_python(program)
    assert said is not None
    assert f"{other} is not the Python that hierdist runs in ({sys.executable})" in said
    assert other_python(parse_command(["train.py"])) is None
    assert other_python(parse_command([sys.executable, "-O", "train.py"])) is None


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ([], "write it after two dashes"),
        (["absent.py"], "'absent.py' does not exist in "),
        ([sys.executable], "name a script"),
        (["-m"], "needs the name of a module"),
        (["no-such-program-anywhere", "x"], "is no program that can be run"),
    ],
)
def test_what_cannot_be_run_is_refused(script: Path, words: list[str], advice: str) -> None:
    with pytest.raises(LaunchError, match=advice):
        parse_command(words)


@pytest.mark.parametrize(("text", "expected"), [("2:4", (2, 4)), ("3", (3, 3)), ("1:1", (1, 1))])
def test_numbers_of_hosts(text: str, expected: tuple[int, int]) -> None:
    assert parse_hosts(text) == expected


@pytest.mark.parametrize(
    ("text", "advice"), [("4:2", "write 2:4"), ("0:3", "write e.g. 1:3"), ("two", "MIN:MAX"), ("2:", "MIN:MAX")]
)
def test_no_numbers_of_hosts(text: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("hosts", "given", "mode"), [((1, 2), None, "degrade"), ((2, 2), None, "restart"), ((1, 2), "off", "off")]
)
def test_the_mode_follows_the_numbers_of_hosts(hosts: tuple[int, int], given: str | None, mode: str) -> None:
    program = Program(Kind.MODULE, "train")
    options = LaunchOptions(program, 2, min_hosts=hosts[0], max_hosts=hosts[1], mode=given)
    assert options.elastic().mode == mode
