"""The secret that the agents of a run share: never printed, and never on a command line, which others can read."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from lightning_dist.errors import ConfigError

VARIABLE = "HIERDIST_SECRET"
FILE_VARIABLE = "HIERDIST_SECRET_FILE"
_MIN_BYTES = 16
_ADVICE = (
    f"make one with `openssl rand -hex 32` and give it to all hosts in the environment variable {VARIABLE}, "
    f"or in a file that only you can read, named by {FILE_VARIABLE}"
)


def read_secret(environ: Mapping[str, str]) -> bytes | None:
    """The secret in the environment, or in the file that it names; ``None`` if there is none.

    Raises:
        ConfigError: It is too short, the file cannot be read, or others can read it.
    """
    if VARIABLE in environ:
        return _checked(environ[VARIABLE].encode(), VARIABLE)
    if FILE_VARIABLE not in environ:
        return None
    path = Path(environ[FILE_VARIABLE])
    try:
        mode = path.stat().st_mode
        data = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{FILE_VARIABLE}={path} cannot be read: {error.strerror or error}; {_ADVICE}") from error
    if mode & 0o077:
        raise ConfigError(f"{FILE_VARIABLE}={path} can be read by others; write: chmod 600 {path}")
    return _checked(data, str(path))


def required(secret: bytes | None) -> bytes:
    """The secret, where several hosts talk to each other.

    Raises:
        ConfigError: There is none.
    """
    if secret is None:
        raise ConfigError(f"several hosts need a secret that they share, so that no stranger joins: {_ADVICE}")
    return secret


def own() -> bytes:
    """A new one, for an agent that talks to nobody but itself."""
    return secrets.token_bytes(32)


def _checked(secret: bytes, where: str) -> bytes:
    if len(secret) < _MIN_BYTES:
        raise ConfigError(f"the secret in {where} has {len(secret)} bytes, at least {_MIN_BYTES} are needed; {_ADVICE}")
    return secret
