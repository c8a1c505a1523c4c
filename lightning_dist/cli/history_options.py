"""The option that says where records of runs are kept."""

from __future__ import annotations

import argparse
from pathlib import Path

_USUAL = (Path("outputs") / "history", Path("history"))


def add_folder(parser: argparse.ArgumentParser) -> None:
    """``--history FOLDER``."""
    parser.add_argument(
        "--history",
        type=Path,
        metavar="FOLDER",
        help=f"where records of runs are kept (default: the first of {' and '.join(map(str, _USUAL))} that is there)",
    )


def folder_of(arguments: argparse.Namespace) -> Path:
    """The folder given, or the usual one."""
    given: Path | None = arguments.history
    return given or next((folder for folder in _USUAL if folder.is_dir()), _USUAL[0])
