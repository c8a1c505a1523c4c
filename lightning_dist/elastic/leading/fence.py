"""A fence: each round is claimed in a folder that all hosts share, so that after a cut only one side starts it.

Note: exclusive on NFS. Who claims writes a file of its own, and gives it the round's name with ``link``, which fails if
that name is there. NFS may repeat a link whose answer was lost, and then report that it failed; so what counts is not
its answer, but whether one's own file has two names.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_dist.elastic.session import End
from lightning_dist.errors import LaunchError

_PREFIX = "round-"
_OVER = "over"


@dataclass(frozen=True)
class Claim:
    """Who has a round.

    Attributes:
        round: Its number.
        host: Of the leader that has it.
        instance: Tells this leader from another one of the same host.
    """

    round: int
    host: str
    instance: str


class Fence:
    """Claims of one run; a folder of the run's name within the given one.

    Args:
        folder: On shared storage.
        run: The run's name.

    Raises:
        LaunchError: The folder cannot be made or written.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._folder = folder / run
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"fence={folder}: the folder cannot be made: {error.strerror}; name one on storage that all hosts share"
            ) from error

    def claim(self, number: int, *, host: str, instance: str) -> Claim:
        """Claim a round; who has it now, which is this host if it was the first.

        Raises:
            LaunchError: The folder cannot be read or written: nobody can tell.
        """
        wanted = Claim(number, host, instance)
        own = self._folder / f".{host}-{secrets.token_hex(8)}"
        target = self._path(number)
        try:
            try:
                with own.open("x", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(wanted)))
                    file.flush()
                    os.fsync(file.fileno())
                with contextlib.suppress(FileExistsError):
                    os.link(own, target)
                if own.stat().st_nlink == 2:
                    return wanted
            finally:
                own.unlink(missing_ok=True)
            return _read(target)
        except OSError as error:
            raise LaunchError(f"fence={self._folder}: round {number} cannot be claimed: {error}") from error

    def claimed(self, number: int) -> Claim | None:
        """Who has a round; ``None``: nobody.

        Raises:
            LaunchError: The folder cannot be read.
        """
        try:
            return _read(self._path(number))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LaunchError(f"fence={self._folder}: the claim of round {number} cannot be read: {error}") from error

    def end(self, exit_code: int, reason: str) -> None:
        """Say that the run is over, for those that come too late.

        Raises:
            LaunchError: The folder cannot be written.
        """
        own = self._folder / f".{_OVER}-{secrets.token_hex(8)}"
        try:
            own.write_text(json.dumps({"exit_code": exit_code, "reason": reason}), encoding="utf-8")
            own.replace(self._folder / _OVER)
        except OSError as error:
            raise LaunchError(f"fence={self._folder}: the end of the run cannot be noted: {error}") from error

    def ended(self) -> End | None:
        """How the run has ended; ``None``: it has not.

        Raises:
            LaunchError: The folder cannot be read.
        """
        path = self._folder / _OVER
        try:
            return End(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, TypeError, ValueError) as error:
            raise LaunchError(f"{path} cannot be read: {error}") from error

    def _path(self, number: int) -> Path:
        return self._folder / f"{_PREFIX}{number:08d}"


def _read(path: Path) -> Claim:
    """A claim is whole when it has its name."""
    try:
        return Claim(**json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise LaunchError(f"{path} is no claim of a round: {error}") from error
