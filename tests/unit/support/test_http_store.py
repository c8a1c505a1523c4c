from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from tests.support.http_store import HttpStore

CONTENT = bytes(range(256)) * 64


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HttpStore]:
    (tmp_path / "served" / "bucket" / "deep").mkdir(parents=True)
    (tmp_path / "served" / "bucket" / "a.bin").write_bytes(CONTENT)
    (tmp_path / "served" / "bucket" / "deep" / "b.bin").write_bytes(b"b")
    (tmp_path / "secret").write_bytes(b"not served")
    with HttpStore(tmp_path / "served") as store:
        yield store


def _get(url: str, part: str | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(url, headers={"Range": part} if part else {})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.status, answer.read()


@pytest.mark.parametrize(
    ("part", "status", "expected"),
    [
        (None, 200, CONTENT),
        ("bytes=0-0", 206, CONTENT[:1]),
        ("bytes=100-199", 206, CONTENT[100:200]),
        ("bytes=16000-", 206, CONTENT[16000:]),
        ("bytes=16000-99999", 206, CONTENT[16000:]),
        ("bytes=-10", 206, CONTENT[-10:]),
    ],
)
def test_files_and_parts_of_files(store: HttpStore, part: str | None, status: int, expected: bytes) -> None:
    assert _get(f"{store.url}/bucket/a.bin", part) == (status, expected)
    counted = store.counted()
    assert counted.served == {"bucket/a.bin": len(expected)}
    assert counted.requests == {"bucket/a.bin": 1}


@pytest.mark.parametrize(
    ("path", "part", "status"),
    [
        ("bucket/none.bin", None, 404),
        ("bucket", None, 404),
        ("bucket/%2e%2e/%2e%2e/secret", None, 404),
        ("bucket/a.bin", f"bytes={len(CONTENT)}-", 416),
    ],
)
def test_what_is_not_there_is_refused(store: HttpStore, path: str, part: str | None, status: int) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        _get(f"{store.url}/{path}", part)
    refused.value.close()
    assert refused.value.code == status
    assert not store.counted().served


def test_clients_of_s3_list_and_read(store: HttpStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in store.s3_variables.items():
        monkeypatch.setenv(name, value)
    with contextlib.closing(boto3.client("s3")) as client:
        every = client.list_objects_v2(Bucket="bucket")
        assert [(each["Key"], each["Size"]) for each in every["Contents"]] == [
            ("a.bin", len(CONTENT)),
            ("deep/b.bin", 1),
        ]
        top = client.list_objects_v2(Bucket="bucket", Delimiter="/")
        assert [each["Key"] for each in top["Contents"]] == ["a.bin"]
        assert [each["Prefix"] for each in top["CommonPrefixes"]] == ["deep/"]
        assert client.head_object(Bucket="bucket", Key="a.bin")["ContentLength"] == len(CONTENT)
        assert client.get_object(Bucket="bucket", Key="a.bin", Range="bytes=100-199")["Body"].read() == CONTENT[100:200]
        assert client.get_object(Bucket="bucket", Key="deep/b.bin")["Body"].read() == b"b"
        with pytest.raises(client.exceptions.NoSuchKey):
            client.get_object(Bucket="bucket", Key="none.bin")
