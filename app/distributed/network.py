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

# Documentation addresses (RFC 5737, RFC 3849), which only a default route can lead to.
ELSEWHERE = ("192.0.2.1", "2001:db8::1")
ANY_PORT = 9


def use_reachable_interface() -> None:
    """Let gloo use an interface that other nodes can reach, unless the user or the host name names one."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    route = find_route(os.environ["MASTER_ADDR"]) if _is_loopback(_own_address(socket.gethostname())) else None
    if route is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = route[1]


def find_route(master_addr: str) -> tuple[str, str] | None:
    """Return the address and interface with which this node reaches node 0, or None if node 0 is unreachable.

    On node 0, its name may be a loopback address. Then the default route counts, otherwise the first interface that
    is up, and loopback only if there is no other.
    """
    own = _own_address(master_addr)
    if own is None:
        return None
    interfaces = {
        _without_zone(address.address): name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }
    # An interface that has just been switched on may still be reported as down, although a route leads through it.
    states = psutil.net_if_stats()
    up = [address for address, name in interfaces.items() if name in states and states[name].isup]
    candidates = [address for address in (own, *map(_own_address, ELSEWHERE), *up) if address in interfaces]
    address = min(candidates, key=_is_loopback, default=None)  # the first one that other nodes can reach
    return None if address is None else (address, interfaces[address])


def _own_address(host: str) -> str | None:
    """Return the address from which this machine sends to a host; None if it cannot send to it."""
    try:
        destinations = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, protocol, _, address in destinations:
        # An error occurs, for example, with an IPv6 address on a machine without IPv6.
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # UDP: selects a route and sends nothing
            return _without_zone(probe.getsockname()[0])
    return None


def _without_zone(address: str) -> str:
    return address.partition("%")[0]


def _is_loopback(address: str | None) -> bool:
    """Whether only this machine can reach an address. One that is unknown counts as well: gloo then takes loopback."""
    return address is None or ipaddress.ip_address(address).is_loopback


def main() -> None:
    """Print the address and the interface, or exit with an error line."""
    route = find_route(sys.argv[1])
    if route is None:
        sys.exit(f"MASTER_ADDR {sys.argv[1]} is unreachable")
    print(*route)


if __name__ == "__main__":
    main()
