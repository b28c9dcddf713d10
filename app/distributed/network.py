"""The network interface that leads to the other nodes of a job.

Gloo and c10d look up this machine's host name, which Debian and Ubuntu map to 127.0.1.1 in /etc/hosts: a loopback
address, which other nodes cannot reach.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress

import psutil

FAMILIES = (socket.AF_INET, socket.AF_INET6)
ANY_PORT = 9


def use_reachable_interface() -> None:
    """Let gloo use the interface that leads to node 0, unless the user names one."""
    route = find_route(os.environ["MASTER_ADDR"])
    if route is not None and not os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ["GLOO_SOCKET_IFNAME"] = route[1]


def find_route(master_addr: str) -> tuple[str, str] | None:
    """Return the address and interface with which this node reaches node 0, or None if node 0 is unreachable.

    On node 0, its name may be a loopback address. Then the default route counts, without one the first interface, and
    loopback only if there is no other.
    """
    if (own := _own_address(master_addr)) is None:
        return None
    by_name = psutil.net_if_addrs().items()
    interfaces = {a.address: name for name, addresses in by_name for a in addresses if a.family in FAMILIES}
    candidates = (own, _own_address("192.0.2.1"), *interfaces)  # reached by the default route only (RFC 5737)
    usable = [address for address in candidates if address in interfaces]
    address = min(usable, key=lambda address: ipaddress.ip_address(address).is_loopback, default=None)
    return None if address is None else (address, interfaces[address])


def _own_address(host: str) -> str | None:
    """Return the address from which this machine sends to a host; None if it cannot send to it."""
    for family in FAMILIES:
        with suppress(OSError, UnicodeError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, ANY_PORT))  # UDP: selects a route and sends nothing
            return str(probe.getsockname()[0])
    return None
