"""Where leaders may be, which of the endpoints is this host's, and the secret they share."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from lightning_dist.elastic.leading import Endpoint, parse, read_secret
from lightning_dist.elastic.leading.endpoints import listen, own_index
from lightning_dist.elastic.leading.secret import FILE_VARIABLE, VARIABLE, required
from lightning_dist.errors import ConfigError, LaunchError


def test_endpoints_are_read_in_their_order() -> None:
    assert parse("a:29400, 10.0.0.2:29401,[::1]:5") == (
        Endpoint("a", 29400),
        Endpoint("10.0.0.2", 29401),
        Endpoint("::1", 5),
    )
    assert [str(endpoint) for endpoint in parse("a:1,[::1]:5")] == ["a:1", "[::1]:5"]


@pytest.mark.parametrize("text", ["", "a", "a:", ":29400", "a:x", "a:0", "a:65536", "::1:5", "a:1,,b:2", "a:\u0661"])
def test_what_is_no_endpoint_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"\[address\]:port|write a:29400, or a:29400,b:29400"):
        parse(text)


def test_an_endpoint_is_named_once() -> None:
    with pytest.raises(ConfigError, match="names a:1 twice"):
        parse("a:1,b:2,a:1")


def test_a_host_knows_its_endpoint_by_name_or_address() -> None:
    endpoints = parse("a:1,10.0.0.2:1,localhost:1")
    assert own_index(endpoints, host="a", address="10.0.0.1") == 0
    assert own_index(endpoints, host="b", address="10.0.0.2") == 1
    assert own_index(endpoints, host="c", address="127.0.0.1") == 2
    assert own_index(endpoints, host="d", address="10.0.0.4") is None


def test_a_listener_is_on_its_address_only_and_a_taken_port_is_an_error_that_says_what_to_do() -> None:
    with listen(Endpoint("a", 0), "127.0.0.1") as listener:
        address, port = listener.getsockname()
        assert address == "127.0.0.1"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=10)
        with pytest.raises(LaunchError, match=f"cannot listen on a:{port}.*write another port, the same on all hosts"):
            listen(Endpoint("a", port), "127.0.0.1")


def test_the_secret_comes_from_the_environment_or_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("the secret in a file\n")
    path.chmod(0o600)
    assert read_secret({}) is None
    assert read_secret({VARIABLE: "the secret of the run"}) == b"the secret of the run"
    assert read_secret({FILE_VARIABLE: str(path)}) == b"the secret in a file"


def test_a_secret_that_is_none_is_refused_and_not_printed(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("the secret in a file\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others; write: chmod 600"):
        read_secret({FILE_VARIABLE: str(path)})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret({FILE_VARIABLE: str(tmp_path / "none")})
    with pytest.raises(ConfigError, match="has 5 bytes, at least 16 are needed") as caught:
        read_secret({VARIABLE: "short"})
    assert "short" not in str(caught.value)
    with pytest.raises(ConfigError, match="openssl rand -hex 32"):
        required(None)
