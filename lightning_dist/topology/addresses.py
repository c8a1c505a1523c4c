"""Where other hosts of a run reach this one."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping

from lightning_dist.errors import TopologyError

_SIOCGIFADDR = 0x8915  # asks the kernel for an interface's IPv4 address
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_ANY_PORT = 9


def own_address(environ: Mapping[str, str]) -> str:
    """This host's IPv4 address on the network of the run.

    That of the interface which ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` names (the first of several, of which
    NCCL may give the beginning only), else the one from which ``MASTER_ADDR`` is reached.

    Args:
        environ: The environment's variables.

    Raises:
        TopologyError: There is no such interface, or it has no IPv4 address; or ``MASTER_ADDR`` cannot be reached.
    """
    for variable in _VARIABLES:
        wanted = environ.get(variable, "").partition(",")[0]
        if wanted and not wanted.startswith("^"):  # NCCL's way to name those not to be used
            return _address_of(wanted.removeprefix("="), variable)
    master = environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, _ANY_PORT))  # sends nothing, and chooses the address to send from
        except OSError as error:
            raise TopologyError(
                f"MASTER_ADDR={master} cannot be reached by IPv4: {error}; name the interface: GLOO_SOCKET_IFNAME=eth0"
            ) from error
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The interface that has an IPv4 address; ``None``: none of this host's."""
    for _, name in socket.if_nameindex():
        try:
            found = _ipv4_of(name)
        except OSError:  # it has none
            continue
        if found == address:
            return name
    return None


def _address_of(wanted: str, variable: str) -> str:
    names = [name for _, name in socket.if_nameindex()]
    found = next((name for name in names if name == wanted), None)
    found = found or next((name for name in names if name.startswith(wanted)), None)
    if found is None:
        raise TopologyError(f"{variable}={wanted}: there is no such interface; there are {', '.join(names)}")
    try:
        return _ipv4_of(found)
    except OSError as error:
        raise TopologyError(f"{variable}={wanted}: {found} has no IPv4 address") from error


def _ipv4_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()))
    return socket.inet_ntoa(answer[20:24])
