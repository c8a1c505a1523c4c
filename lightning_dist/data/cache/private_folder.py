"""A folder that is this user's alone, also where others may write beside it, as in ``/tmp``."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from lightning_dist.errors import DataCacheError

_ADVICE = "name another folder for the cache of training data"


def default_folder() -> Path:
    """Where the cache is if nothing is said: in the user's cache directory.

    Raises:
        DataCacheError: The user has none.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        home = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    except RuntimeError as error:
        raise DataCacheError(f"this user has no home, so {_ADVICE}") from error
    return home / "lightning_dist" / "data"


def private_folder(path: Path) -> Path:
    """Make a folder that only this user can enter, or check one that is there; its absolute path.

    A folder that is there may let others read, which its owner has decided then, but not write. A link is followed if
    it is this user's.

    Raises:
        DataCacheError: It is somebody else's, others can write there, or it cannot be made.
    """
    path = Path(os.path.abspath(path))
    try:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700)
        if path.is_symlink():
            _check_owner(path, os.lstat(path))
            path = path.resolve()
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataCacheError(f"{path} cannot be a cache: {error.strerror}; {_ADVICE}") from error
    _check_owner(path, status)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DataCacheError(
            f"{path} cannot be a cache: others may write there (its mode is {stat.S_IMODE(status.st_mode):o}); "
            f"chmod 700 it if what is in it is yours, or {_ADVICE}"
        )
    return path


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise DataCacheError(
            f"{path} cannot be a cache: it belongs to user {status.st_uid}, and this process is user {os.geteuid()}; "
            f"{_ADVICE}"
        )
