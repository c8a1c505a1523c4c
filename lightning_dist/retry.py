"""Trying again: which errors of storage may pass, and how long to wait before the next try."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from lightning_dist.errors import HierDistError, StorageError

_T = TypeVar("_T")

_PASSING_ERRNO = frozenset(
    getattr(errno, name)
    for name in (
        "EAGAIN", "EBUSY", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH", "EINTR",
        "ENETDOWN", "ENETRESET", "ENETUNREACH", "EPIPE", "ESTALE", "ETIMEDOUT",
    )
)  # fmt: skip
_PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
# Errors of HTTP clients (botocore, aiohttp), which are not imported here.
_PASSING_NAMES = frozenset({
    "ClientConnectionError", "ClientPayloadError", "ConnectionClosedError", "ConnectTimeoutError",
    "EndpointConnectionError", "HTTPClientError", "IncompleteRead", "IncompleteReadError", "ReadTimeoutError",
    "ResponseStreamingError", "ServerDisconnectedError", "ServerTimeoutError",
})  # fmt: skip
_PASSING_CODES = frozenset({"InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown", "Throttling"})


def may_pass(error: BaseException) -> bool:
    """Whether the same operation may work a moment later.

    It may after a lost connection, a timeout, or an answer that the server is busy; it will not after a full disk, a
    denied access, a missing file. What is not known is taken for permanent.
    """
    return any(_may_pass(link) for link in _chain(error))


def failed(error: BaseException) -> str:
    """What went wrong, in a line: type and message of an error, and of its cause if that says more."""
    return " <- ".join(dict.fromkeys(f"{type(link).__name__}: {link}".rstrip(": ") for link in _chain(error)))


@dataclass(frozen=True)
class Retry:
    """How often an operation is tried, and what is waited for in between: twice as long each time.

    Attributes:
        attempts: Tries in all.
        first_wait_s: Before the second try, in seconds.
        longest_wait_s: Between any two, in seconds.
        sleep: Waits for so many seconds.
    """

    attempts: int = 6
    first_wait_s: float = 0.5
    longest_wait_s: float = 20.0
    sleep: Callable[[float], None] = time.sleep

    def call(self, attempt: Callable[[], _T], what: str, *, refusal: type[HierDistError] = StorageError) -> _T:
        """What ``attempt`` returns.

        Args:
            attempt: Called again after errors that may pass.
            what: Operation and place, e.g. ``write s3://bucket/a``, for the message.
            refusal: Kind of error to raise.

        Raises:
            HierDistError: Of that kind; it failed for good.
        """
        wait_s = self.first_wait_s
        for number in range(1, self.attempts + 1):
            try:
                return attempt()
            except HierDistError:
                raise
            except Exception as error:
                if number == self.attempts or not may_pass(error):
                    tries = f" after {number} tries" if number > 1 else ""
                    raise refusal(f"cannot {what}{tries}: {failed(error)}{_advice(error)}") from error
                self.sleep(wait_s)
                wait_s = min(2 * wait_s, self.longest_wait_s)
        raise ValueError(f"attempts must be at least 1, got {self.attempts}")


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    if isinstance(error, OSError) and error.errno in _PASSING_ERRNO:
        return True
    if any(kind.__name__ in _PASSING_NAMES for kind in type(error).__mro__):
        return True
    response = getattr(error, "response", None)
    response = response if isinstance(response, dict) else {}
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", getattr(error, "status", None))
    code = response.get("Error", {}).get("Code")
    return status in _PASSING_STATUS or getattr(error, "code", None) in _PASSING_STATUS or code in _PASSING_CODES


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _advice(error: BaseException) -> str:
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "; make room there (old checkpoints: hierdist checkpoint prune)"
    return ""
