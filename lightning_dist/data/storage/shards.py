"""Where shards are read from: a folder on disk or at a URL.

Local folders are read with ``os``, everything else through fsspec. What cannot be read is an
:class:`~lightning_dist.errors.UnreadableShardError` that names the file, the bytes and the reason; errors that may pass
are tried again first, by :class:`~lightning_dist.retry.Retry`.

Note: processes. fsspec's file systems do not survive a fork: their event loop runs in a thread, which the child lacks.
So a folder opens its file system again in a process that is not the one that opened it; it can also be pickled, and
then carries the storage options along.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec

from lightning_dist.data.reading import ReadFolder
from lightning_dist.errors import DataError, ForeignDataError, UnreadableShardError
from lightning_dist.retry import Retry, failed

_T = TypeVar("_T")

# Two stores may have the same URL. Secrets are left out, and what does not say where files are.
_SERVER_OPTIONS = frozenset(
    ("endpoint_url", "endpoint", "endpoint_override", "host", "hostname", "port", "account_name", "base_url", "profile")
)
_SERVER_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE")


def open_read_folder(
    url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, retry: Retry | None = None
) -> ReadFolder:
    """The folder of a data set at a path or URL.

    Args:
        url: A path, ``file://``, or anything fsspec knows: ``s3://``, ``gs://``, ``https://``, ``memory://``, ...
        storage_options: For fsspec's file system. They are not stored anywhere and not printed.
        retry: How errors that may pass are tried again.

    Raises:
        ForeignDataError: The protocol is unknown, or the package for it is not installed.
        UnreadableShardError: The file system cannot be opened.
    """
    text, retry = os.fspath(url), retry if retry is not None else Retry()
    if "://" not in text and "::" not in text:
        return LocalReadFolder(Path(text), text, retry)
    if text.startswith(("file://", "local://")):
        return LocalReadFolder(Path(fsspec.core.url_to_fs(text)[1]), text, retry)
    return RemoteReadFolder(text, dict(storage_options or {}), retry)


def with_sleep(folder: ReadFolder, sleep: Callable[[float], None]) -> ReadFolder:
    """The same folder, whose waits between tries are ``sleep``, which may raise to end them."""
    if isinstance(folder, RemoteReadFolder):
        return folder.with_retry(replace(folder.retry, sleep=sleep))
    return folder


class LocalReadFolder:
    """A folder on disk; see :class:`~lightning_dist.data.reading.ReadFolder`.

    Args:
        path: Of the folder.
        url: As the user gave it.
        retry: For errors that may pass (a mounted file system's).
    """

    def __init__(self, path: Path, url: str, retry: Retry) -> None:
        self._folder = path
        self._retry = retry
        self.url = self.origin = url

    def read(self, name: str) -> bytes | None:
        """See ``ReadFolder``."""

        def attempt() -> bytes | None:
            try:
                return (self._folder / name).read_bytes()
            except FileNotFoundError:
                return None

        return self._do(f"read {self._folder / name}", attempt)

    def read_range(self, name: str, start: int, size_bytes: int) -> bytes:
        """See ``ReadFolder``."""
        what = _range(str(self._folder / name), start, size_bytes)

        def attempt() -> bytes:
            with open(self._folder / name, "rb") as file:
                file.seek(start)
                return file.read(size_bytes)

        return _exactly(self._do(what, attempt), size_bytes, what)

    def sizes(self) -> dict[str, int]:
        """See ``ReadFolder``."""

        def attempt() -> dict[str, int]:
            found = {}
            for folder, _, names in os.walk(self._folder, onerror=_raise):
                for name in names:
                    path = Path(folder, name)
                    try:
                        found[path.relative_to(self._folder).as_posix()] = path.stat().st_size
                    except OSError as error:
                        if error.errno not in (errno.ENOENT, errno.ELOOP):  # a link to nothing, or removed meanwhile
                            raise
            return dict(sorted(found.items()))

        return self._do(f"list {self._folder}", attempt)

    def local_path(self, name: str) -> Path | None:
        """See ``ReadFolder``."""
        return self._folder / name

    def _do(self, what: str, attempt: Callable[[], _T]) -> _T:
        return self._retry.call(attempt, what, refusal=UnreadableShardError)


class RemoteReadFolder:
    """A folder of an fsspec file system; see :class:`~lightning_dist.data.reading.ReadFolder`.

    Args:
        url: As the user gave it.
        storage_options: For fsspec's file system.
        retry: For errors that may pass.
    """

    def __init__(self, url: str, storage_options: dict[str, Any], retry: Retry) -> None:
        self._given = url
        self._storage_options = storage_options
        self._secrets = _secrets(url)
        self._opened: tuple[int, Any, str] | None = None
        self.retry = retry
        self.url = self._without_secrets(url)
        file_system, _ = self._file_system()  # a wrong URL is to be known at once
        servers = _servers({**self._storage_options, **file_system.storage_options}) + _servers_of_environment(url)
        self.origin = " ".join([self.url.rstrip("/"), *servers])

    def with_retry(self, retry: Retry) -> RemoteReadFolder:
        """The same folder; errors that may pass are tried again in another way."""
        return RemoteReadFolder(self._given, self._storage_options, retry)

    def read(self, name: str) -> bytes | None:
        """See ``ReadFolder``."""

        def attempt() -> bytes | None:
            file_system, path = self._file_system()
            try:
                return bytes(file_system.cat_file(_joined(path, name)))
            except FileNotFoundError:
                return None

        return self._do(f"read {self._shown(name)}", attempt)

    def read_range(self, name: str, start: int, size_bytes: int) -> bytes:
        """See ``ReadFolder``."""
        what = _range(self._shown(name), start, size_bytes)
        if size_bytes == 0:
            return b""

        def attempt() -> bytes:
            file_system, path = self._file_system()
            return bytes(file_system.cat_file(_joined(path, name), start=start, end=start + size_bytes))

        return _exactly(self._do(what, attempt), size_bytes, what)

    def sizes(self) -> dict[str, int]:
        """See ``ReadFolder``."""
        if self._given.startswith(("http://", "https://")):
            raise ForeignDataError(
                f"{self.url}: files on a web server cannot be listed; put an index beside the shards "
                "(hierdist data index, where they can be listed)"
            )

        def attempt() -> dict[str, int]:
            file_system, path = self._file_system()
            root, found = path.strip("/"), {}
            for full, entry in file_system.find(path, detail=True).items():
                name = full.strip("/").removeprefix(root).strip("/")
                if name and entry["type"] == "file":  # an object store may list the folder itself
                    found[name] = int(entry["size"])
            return dict(sorted(found.items()))

        return self._do(f"list {self.url}", attempt)

    def local_path(self, name: str) -> Path | None:
        """See ``ReadFolder``."""
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def _file_system(self) -> tuple[Any, str]:
        """The file system of this process, and the folder's path in it; see the note on processes."""
        if self._opened is None or self._opened[0] != os.getpid():
            try:
                # Listings are asked for anew: other processes write too.
                found = fsspec.core.url_to_fs(self._given, use_listings_cache=False, **self._storage_options)
            except (ImportError, ValueError) as error:
                raise ForeignDataError(self._without_secrets(f"{self._given} cannot be opened: {error}")) from error
            except Exception as error:
                text = f"{self._given} cannot be opened: {failed(error)}"
                raise UnreadableShardError(self._without_secrets(text)) from error
            self._opened = (os.getpid(), *found)
        return self._opened[1:]

    def _do(self, what: str, attempt: Callable[[], _T]) -> _T:
        try:
            return self.retry.call(attempt, what, refusal=UnreadableShardError)
        except DataError as error:
            if not self._secrets:
                raise
            raise type(error)(self._without_secrets(str(error))) from None  # the cause would say them

    def _shown(self, name: str) -> str:
        return self._without_secrets(_joined(self._given.rstrip("/"), name))

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _secrets(url: str) -> list[str]:
    """What a URL holds that is not to be printed: a password, and all of a query, which may be a signature."""
    found = []
    for part in url.split("::"):
        with contextlib.suppress(ValueError):
            split = urlsplit(part)
            found += [secret for secret in (split.password, split.query) if secret]
    return found


def _servers(options: Mapping[str, Any]) -> list[str]:
    """What options say of where files are, in options of file systems below too; no secrets."""
    found: list[str] = []
    for name, value in sorted(options.items()):
        if isinstance(value, Mapping):
            found += [f"{name}.{server}" for server in _servers(value)]
        elif name in _SERVER_OPTIONS and isinstance(value, str | int):
            found.append(f"{name}={re.sub('//[^/@]*@', '//', str(value))}")
    return found


def _servers_of_environment(url: str) -> list[str]:
    return [f"{name}={os.environ[name]}" for name in _SERVER_VARIABLES if "s3://" in url and os.environ.get(name)]


def _joined(folder: str, name: str) -> str:
    """The path or URL of a file in a folder; a query stays at the end, a chain of URLs at its place."""
    head, chain, rest = folder.partition("::")
    if chain and "://" in head:
        return f"{_joined(head, name)}::{rest}"
    path, mark, query = folder.partition("?") if folder.startswith(("http://", "https://")) else (folder, "", "")
    return f"{path.rstrip('/')}/{name}{mark}{query}"


def _range(file: str, start: int, size_bytes: int) -> str:
    return f"read bytes {start} to {start + size_bytes} of {file}"


def _exactly(data: bytes, size_bytes: int, what: str) -> bytes:
    if len(data) < size_bytes:
        raise UnreadableShardError(f"cannot {what}: only {len(data)} bytes of {size_bytes} are there; it is cut short")
    if len(data) > size_bytes:
        raise UnreadableShardError(
            f"cannot {what}: the server sent {len(data)} bytes instead of {size_bytes}; it has no byte ranges, "
            "so use another server, or copy the data to this host"
        )
    return data


def _raise(error: OSError) -> None:
    raise error
