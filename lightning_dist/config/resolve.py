"""From what a user may write to a config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from lightning_dist.errors import ConfigError, unknown_key, unknown_option

ConfigT = TypeVar("ConfigT")


def resolve(
    what: str, given: Any, config_type: type[ConfigT], presets: Mapping[str, ConfigT | Mapping[str, Any]]
) -> ConfigT:
    """Turn what a user may write into a config: a preset's name, a mapping of options, or the config itself.

    Args:
        what: Name of the group, for messages, e.g. ``"sync"``.
        given: A preset's name, a mapping (as Hydra hands over), or a ready config.
        config_type: The dataclass wanted.
        presets: Name -> config; of an option that needs values of the user's, the fields that its name stands for.

    Raises:
        UnknownOptionError: The name is no preset, or a key is no option.
        ConfigError: The value is of another type, or out of range.
    """
    if isinstance(given, config_type):
        return given
    if isinstance(given, str):
        if given not in presets:
            raise unknown_option(what, given, presets)
        preset = presets[given]
        return config_type(**preset) if isinstance(preset, Mapping) else preset
    if isinstance(given, Mapping):
        return from_mapping(what, given, config_type)
    raise ConfigError(
        f"{what} must be one of {', '.join(presets)}, a mapping of options or a {config_type.__name__}, "
        f"got {type(given).__name__}"
    )


def resolve_options(what: str, given: Any, config_type: type[ConfigT]) -> ConfigT:
    """The same for a group that has no presets: a mapping of options, the config itself, or ``None`` for its defaults.

    Raises:
        UnknownOptionError: A key is no option.
        ConfigError: The value is of another type, or out of range.
    """
    if given is None:
        return config_type()
    if isinstance(given, config_type):
        return given
    if isinstance(given, Mapping):
        return from_mapping(what, given, config_type)
    raise ConfigError(
        f"{what} must be a {config_type.__name__} or a mapping of its options, got {type(given).__name__}"
    )


def from_mapping(what: str, values: Mapping[str, Any], config_type: type[ConfigT]) -> ConfigT:
    """Make a config from a mapping; nested mappings become nested configs. Unknown keys are refused."""
    if not dataclasses.is_dataclass(config_type):
        raise TypeError(f"{config_type!r} is not a config")
    fields = {f.name: f for f in dataclasses.fields(config_type)}
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            raise unknown_key(f"{what}.{key}", what, fields)
        nested = fields[key].default_factory
        if isinstance(nested, type) and dataclasses.is_dataclass(nested) and isinstance(value, Mapping):
            value = from_mapping(f"{what}.{key}", value, nested)
        arguments[key] = value
    try:
        return config_type(**arguments)
    except TypeError as error:
        raise ConfigError(f"{what}: {error}") from error
