"""The network interface that leads to the other nodes of a job.

Gloo and c10d look up this machine's host name, which Debian and Ubuntu map to 127.0.1.1 in /etc/hosts: a loopback
address, which other nodes cannot reach.

As a program, print this node's address and network interface for a job that node 0 hosts (multi_node.sh uses it):

    python -m app.distributed.network MASTER_ADDR
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from contextlib import suppress

import psutil

ELSEWHERE = "192.0.2.1"  # a documentation address (RFC 5737), which only a default route can lead to
ANY_PORT = 9


def use_reachable_interface() -> None:
    """Let gloo use the interface that leads to node 0, unless the user names one."""
    route = find_route(os.environ["MASTER_ADDR"])
    if route is not None and not os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ["GLOO_SOCKET_IFNAME"] = route[1]


def find_route(master_addr: str) -> tuple[str, str] | None:
    """Return the address and interface with which this node reaches node 0, or None if node 0 is unreachable.

    On node 0, its name may be a loopback address. Then the default route counts, otherwise the first interface that
    is up, and loopback only if there is no other.
    """
    if (own := _own_address(master_addr)) is None:
        return None
    families = (socket.AF_INET, socket.AF_INET6)
    places = [(a.address, name) for name, all_ in psutil.net_if_addrs().items() for a in all_ if a.family in families]
    # An interface that has just been switched on may still be reported as down, although a route leads through it.
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    interfaces = dict(places)
    candidates = [own, _own_address(ELSEWHERE), *(address for address, name in places if name in up)]
    usable = [address for address in candidates if address in interfaces]
    address = min(usable, key=lambda address: ipaddress.ip_address(address).is_loopback, default=None)
    return None if address is None else (address, interfaces[address])


def _own_address(host: str) -> str | None:
    """Return the address from which this machine sends to a host; None if it cannot send to it."""
    with suppress(OSError, UnicodeError):
        for family, kind, protocol, _, destination in socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM):
            # An error occurs, for example, with an IPv6 address on a machine without IPv6.
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(destination)  # UDP: selects a route and sends nothing
                return str(probe.getsockname()[0])
    return None


if __name__ == "__main__":
    print(*(find_route(sys.argv[1]) or sys.exit(f"MASTER_ADDR {sys.argv[1]} is unreachable")))
