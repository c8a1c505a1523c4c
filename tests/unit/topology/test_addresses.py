"""Where other hosts reach this one: what the environment names, else the way to the first rank."""

from __future__ import annotations

import pytest

from lightning_dist.errors import TopologyError
from lightning_dist.topology.addresses import interface_of, own_address


@pytest.mark.parametrize(
    "environ",
    [
        {"GLOO_SOCKET_IFNAME": "lo"},
        {"NCCL_SOCKET_IFNAME": "=lo,eth7"},
        {"NCCL_SOCKET_IFNAME": "l"},
        {"NCCL_SOCKET_IFNAME": "^docker0", "MASTER_ADDR": "127.0.0.1"},
        {"MASTER_ADDR": "localhost"},
        {},
    ],
)
def test_it_is_found(environ: dict[str, str]) -> None:
    assert own_address(environ) == "127.0.0.1"


def test_what_is_not_there_is_said() -> None:
    with pytest.raises(TopologyError, match=r"GLOO_SOCKET_IFNAME=none7: there is no such interface; there are .*lo"):
        own_address({"GLOO_SOCKET_IFNAME": "none7"})
    with pytest.raises(TopologyError, match=r"MASTER_ADDR=::1 cannot be reached by IPv4.*GLOO_SOCKET_IFNAME=eth0"):
        own_address({"MASTER_ADDR": "::1"})


@pytest.mark.parametrize(
    ("address", "interface"), [("127.0.0.1", "lo"), ("192.0.2.1", None), ("::1", None), ("a", None)]
)
def test_the_interface_of_an_address(address: str, interface: str | None) -> None:
    assert interface_of(address) == interface
