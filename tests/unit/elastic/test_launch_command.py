"""What ``hierdist launch`` hands to the agent."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_dist.cli import launch, main


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the agent was called with, instead of an agent."""
    found: dict[str, Any] = {}

    def run_host(options: object, **others: Any) -> int:
        found.update(others)
        return 0

    monkeypatch.setattr(launch, "run_host", run_host)
    monkeypatch.setenv("HIERDIST_SECRET", "of the tests, and of nobody else")
    return found


@pytest.mark.parametrize(
    ("arguments", "given", "expected"),
    [
        (["--rendezvous=127.0.0.1:29400"], None, "lo"),
        (["--rendezvous=127.0.0.1:29400", "--address=192.0.2.1"], None, None),  # of no interface here
        (["--rendezvous=127.0.0.1:29400", "--address=127.0.0.1"], "eth7", "eth7"),
        ([], None, None),  # one host
    ],
)
def test_ranks_of_several_hosts_use_the_interface_that_the_others_reach(
    handed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    given: str | None,
    expected: str | None,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if given is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    assert main(["launch", *arguments, "--", "true"]) == 0
    assert handed["environ"].get("GLOO_SOCKET_IFNAME") == expected
    assert "HIERDIST_SECRET" not in handed["environ"]
