"""What a user's command line runs: a Python script, a Python module, or another program."""

from __future__ import annotations

import enum
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dist.errors import LaunchError

_EXAMPLE = "hierdist launch -- python train.py --lr 0.1"
_PYTHON = re.compile(r"python(3(\.\d+)?)?")


class Kind(str, enum.Enum):
    """How a command is run."""

    SCRIPT = "script"  # in a process forked from the template
    MODULE = "module"  # likewise
    PROGRAM = "program"  # started anew


@dataclass(frozen=True)
class Program:
    """What a rank runs.

    Attributes:
        kind: How.
        target: Path of the script, name of the module, or path of the program.
        arguments: What follows on the command line.
    """

    kind: Kind
    target: str
    arguments: tuple[str, ...] = ()

    @property
    def import_folder(self) -> str:
        """Where Python looks for modules first when it runs this."""
        return os.path.dirname(os.path.realpath(self.target)) if self.kind is Kind.SCRIPT else os.getcwd()

    def __str__(self) -> str:
        return os.path.basename(self.target) if self.kind is not Kind.MODULE else self.target


def parse_command(words: Sequence[str], *, interpreter: str = sys.executable) -> Program:
    """What the words after ``--`` say: ``python train.py``, ``train.py``, ``-m package.train``, ``./any``.

    A Python that is not this one, or that is given options other than ``-u``, is a program like any other.

    Args:
        words: The command line.
        interpreter: Path of this Python.

    Raises:
        LaunchError: There is none, or what it names is not there.
    """
    if not words:
        raise LaunchError(f"there is no command to run; write it after two dashes: {_EXAMPLE}")
    first, rest = words[0], list(words[1:])
    if _is_this_python(first, interpreter):
        while rest and rest[0] == "-u":  # what ranks print is never held back
            rest.pop(0)
        if not rest:
            raise LaunchError(f"{first!r} alone would read from the terminal; name a script: {_EXAMPLE}")
        if rest[0] == "-m" or not rest[0].startswith("-"):
            first, rest = rest[0], rest[1:]
            return _module(rest) if first == "-m" else _script(first, rest)
        return Program(Kind.PROGRAM, interpreter, tuple(rest))
    if first == "-m":
        return _module(rest)
    if first.endswith(".py"):
        return _script(first, rest)
    found = shutil.which(first)
    if found is None:
        raise LaunchError(f"{first!r} is no program that can be run, and no .py file; write e.g. {_EXAMPLE}")
    return Program(Kind.PROGRAM, os.path.abspath(found), tuple(rest))


def other_python(program: Program, *, interpreter: str = sys.executable) -> str | None:
    """What to tell people who run another Python than this one, as a rule by mistake; ``None``: they do not."""
    if program.kind is not Kind.PROGRAM or not _PYTHON.fullmatch(os.path.basename(program.target)):
        return None
    if _is_this_python(program.target, interpreter):
        return None  # with options of its own
    return (
        f"{program.target} is not the Python that hierdist runs in ({interpreter}): ranks start anew each time, and "
        "need torch, lightning and lightning_dist there; for this one leave the word python out: -- train.py"
    )


def _script(path: str, arguments: list[str]) -> Program:
    if not os.path.exists(path):
        raise LaunchError(f"the script {path!r} does not exist in {os.getcwd()}")
    return Program(Kind.SCRIPT, path, tuple(arguments))


def _module(words: list[str]) -> Program:
    if not words:
        raise LaunchError("-m needs the name of a module, e.g. hierdist launch -- python -m my_package.train")
    return Program(Kind.MODULE, words[0], tuple(words[1:]))


def _is_this_python(word: str, interpreter: str) -> bool:
    """Another environment's Python has other packages; so the folder counts, not only what its link leads to."""
    if not _PYTHON.fullmatch(os.path.basename(word)):
        return False
    found = shutil.which(word)
    if found is None:
        return False
    same_folder = os.path.dirname(os.path.abspath(found)) == os.path.dirname(os.path.abspath(interpreter))
    return same_folder and os.path.realpath(found) == os.path.realpath(interpreter)
