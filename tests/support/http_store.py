"""Shared storage that a test or a benchmark starts: a folder served over HTTP and S3, on this machine or on a host.

Usage::

    with NamespaceCluster(3) as cluster, HttpStore(folder, host=cluster["c"]) as store:
        cluster["c"].set_rate(400)
        ...                       # read store.url + "/bucket/key"; or, with store.s3_variables set, s3://bucket/key
        print(store.counted().link_bytes)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.support import http_files, tied
from tests.support.cluster import Host, in_namespace
from tests.support.processes import kill_all

DEADLINE_S = 20.0


@dataclass(frozen=True)
class Counted:
    """What a store has sent.

    Attributes:
        served: File, by its path -> bytes of it, without any headers.
        requests: File -> how often it was asked for.
        link_bytes: All that the host's link has sent, headers included; 0 without a host.
    """

    served: Mapping[str, int]
    requests: Mapping[str, int]
    link_bytes: int

    @property
    def served_bytes(self) -> int:
        """Of all files."""
        return sum(self.served.values())


class HttpStore:
    """A folder that is served until the ``with`` ends; the server dies with the thread that started it.

    Args:
        folder: What is served. A folder in it is a bucket.
        host: Where the server runs; without one on this machine's loopback.
    """

    def __init__(self, folder: Path, *, host: Host | None = None) -> None:
        self.address = "127.0.0.1" if host is None else host.address
        self._netns = None if host is None else host.netns
        command = [sys.executable, "-I", "-S", tied.__file__, str(os.getpid()), self._netns or "-"]
        command += [sys.executable, "-I", "-S", http_files.__file__, str(folder), self.address]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline() or 0)
        if not self.port:
            self.close()
            raise OSError(f"the store on {self.address} ended before it had a port")

    def __enter__(self) -> HttpStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Without a slash at its end."""
        return f"http://{self.address}:{self.port}"

    @property
    def s3_variables(self) -> dict[str, str]:
        """Environment variables by which clients of S3 come here."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "S3_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "anybody",
            "AWS_SECRET_ACCESS_KEY": "anybody",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def counted(self) -> Counted:
        """What was sent so far."""
        return self._counted() if self._netns is None else in_namespace(self._netns, self._counted)

    def _counted(self) -> Counted:
        return counted_at(self.url)

    def close(self) -> None:
        """End the server. Safe twice."""
        kill_all([self._process.pid] if self._process.poll() is None else [])
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def counted_at(url: str) -> Counted:
    """What the store at a URL has sent so far; this question is in its next answer's ``link_bytes``."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{url}/?{http_files.COUNTED}", timeout=DEADLINE_S) as answer:
        return Counted(**json.load(answer))
