"""Numbers on the command line: each one that is none, or none that can be, is refused by the option's name."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_dist.cli import COMMANDS, main

# What a command needs besides, before and after the option.
NEEDED: dict[str, tuple[list[str], list[str]]] = {
    "ab": (["--a", "sync=hierarchical", "--b", "sync=bf16"], ["--", "true"]),
    "topology": (["--cluster", "2x2"], []),
    "history": ([], []),
    "doctor": ([], ["--", "true"]),
    "laws": ([], []),
}


def parsers(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """The options that take a number with a point, with their command's words."""
    for action in parser._actions:
        if action.type is float:
            yield words, action.option_strings[-1]
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from parsers(inner, (*words, name))


def options() -> list[tuple[tuple[str, ...], str]]:
    found: list[tuple[tuple[str, ...], str]] = []
    for name, command in COMMANDS.items():
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        found += parsers(parser, (name,))
    return found


def test_all_commands_with_such_numbers_are_tested() -> None:
    assert {words[0] for words, _ in options()} == set(NEEDED)
    assert len(options()) >= 9


@pytest.mark.parametrize("given", ["nan", "inf", "-inf", "-1"])
@pytest.mark.parametrize(("words", "option"), options(), ids=str)
def test_what_is_no_number_of_them_is_refused_by_name(
    words: tuple[str, ...],
    option: str,
    given: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "history").mkdir(parents=True)
    before, after = NEEDED[words[0]]
    assert main([*words, *before, f"{option}={given}", *after]) == 2
    said = capsys.readouterr().err
    assert f"{option} must be" in said
    assert given in said
