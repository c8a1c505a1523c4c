"""Files in the folder that an agent shares with the ranks of its host; each appears whole, or not at all."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from lightning_dist.config import ElasticConfig
from lightning_dist.config.resolve import from_mapping
from lightning_dist.elastic.policy.sizes import Sizes
from lightning_dist.errors import ConfigError

_T = TypeVar("_T")

OPTIONS_FILE = "options.json"
SIZES_FILE = "sizes.json"


def tell_options(folder: Path, config: ElasticConfig) -> None:
    """Let the agent know what the script wants to become of failures."""
    write_json(folder / OPTIONS_FILE, asdict(config))


def told_options(folder: Path) -> ElasticConfig | None:
    """What the script wants; ``None``: it has not said so yet.

    Raises:
        ConfigError: The file is no such thing, e.g. that of another version.
    """
    return _told(folder / OPTIONS_FILE, "elastic", ElasticConfig)


def tell_sizes(folder: Path, sizes: Sizes) -> None:
    """Let the agent know which hosts and ranks the script's layout fits."""
    write_json(folder / SIZES_FILE, asdict(sizes))


def told_sizes(folder: Path) -> Sizes | None:
    """What the script's layout fits; ``None``: it has not said so yet.

    Raises:
        ConfigError: The file is no such thing, e.g. that of another version.
    """
    return _told(folder / SIZES_FILE, "sizes", Sizes)


def write_json(path: Path, value: Any) -> None:
    """Write a small file that is there as a whole once it is there; readable by this user only."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(value, file)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """What :func:`write_json` wrote; ``None`` if it is not there.

    Raises:
        ConfigError: It is no JSON.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _told(path: Path, name: str, kind: type[_T]) -> _T | None:
    found = read_json(path)
    if found is None:
        return None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no {path.stem}: {found!r}")
    return from_mapping(name, found, kind)
