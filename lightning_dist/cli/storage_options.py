"""``--option KEY=VALUE``: options of the file system at a URL, for every command that reads or writes there."""

from __future__ import annotations

import argparse

from lightning_dist.errors import ConfigError


def add_storage_options(parser: argparse.ArgumentParser) -> None:
    """Let a command take ``--option``, any number of times."""
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the file system, e.g. endpoint_url=http://...; secrets come from the environment",
    )


def storage_options(arguments: argparse.Namespace) -> dict[str, str]:
    """What was given by ``--option``, for fsspec.

    Raises:
        ConfigError: One has no ``=``.
    """
    options = {}
    for text in arguments.option:
        key, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(
                f"--option {text!r} cannot be read; write e.g. --option endpoint_url=http://127.0.0.1:9000"
            )
        options[key] = value
    return options
