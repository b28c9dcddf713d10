"""The network interface that leads to the other nodes of a job.

Gloo and c10d look up this machine's host name, which Debian and Ubuntu map to 127.0.1.1 in /etc/hosts: a loopback
address, which other nodes cannot reach.

As a program, print this node's address and network interface for a job that node 0 hosts (multi_node.sh uses it). With
a port, a line on standard error says if nothing answers there, neither a program nor the system:

    python -m app.distributed.network MASTER_ADDR [MASTER_PORT]
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress

import psutil

from ..common.errors import UserError, shorten

# Documentation addresses (RFC 5737, RFC 3849), which only a default route can lead to.
ELSEWHERE = ("192.0.2.1", "2001:db8::1")
ANY_PORT = 9
CONNECT_SECONDS = 5.0


def use_reachable_interface() -> None:
    """Let gloo use an interface that other nodes can reach, unless the user or the host name names one."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    route = find_route(os.environ["MASTER_ADDR"]) if is_loopback(_own_address(socket.gethostname())) else None
    if route is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = route[1]


def gloo_interface() -> tuple[str, str]:
    """Return the address and the interface on which gloo waits for the other ranks, in this process.

    Raises:
        UserError: GLOO_SOCKET_IFNAME names an interface that this machine does not have.
    """
    interfaces = _interfaces()
    if requested := os.environ.get("GLOO_SOCKET_IFNAME"):
        name = requested.partition(",")[0]
        if name not in interfaces.values():
            raise UserError(f"GLOO_SOCKET_IFNAME={shorten(requested)}: {socket.gethostname()} has {list_interfaces()}")
        return next((address, other) for address, other in interfaces.items() if other == name)
    address = _own_address(socket.gethostname()) or "127.0.0.1"
    return address, interfaces.get(address, "unknown interface")


def list_interfaces() -> str:
    """Return the addresses that other machines may reach, with their interfaces, as one line."""
    reachable = [f"{name} ({address})" for address, name in _interfaces().items() if not is_loopback(address)]
    return ", ".join(reachable) or "only loopback interfaces"


def find_route(master_addr: str) -> tuple[str, str] | None:
    """Return the address and interface with which this node reaches node 0, or None if node 0 is unreachable.

    On node 0, its name may be a loopback address. Then the default route counts, otherwise the first interface that
    is up, and loopback only if there is no other.
    """
    own = _own_address(master_addr)
    if own is None:
        return None
    interfaces = _interfaces()
    # An interface that has just been switched on may still be reported as down, although a route leads through it.
    up = (address for address, name in interfaces.items() if _is_up(name))
    addresses = (own, *map(_own_address, ELSEWHERE), *up)
    candidates = [address for address in addresses if address in interfaces]
    address = min(candidates, key=is_loopback, default=None)  # the first one that other nodes can reach
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


def connection_problem(host: str, port: int) -> str | None:
    """Try to connect to a port; return why that fails, or None."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except TimeoutError:
        return f"no answer within {CONNECT_SECONDS:g} s: a firewall drops the packets, or the address is wrong"
    except ConnectionRefusedError:
        return "refused: no program listens at this port, or a firewall rejects it"
    except (OSError, UnicodeError, OverflowError) as problem:
        return getattr(problem, "strerror", None) or str(problem)
    return None


def _interfaces() -> Mapping[str, str]:
    """Return the interface of each IP address of this machine."""
    return {
        _without_zone(address.address): name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }


def _is_up(interface: str) -> bool:
    statistics = psutil.net_if_stats()
    return interface in statistics and statistics[interface].isup


def _without_zone(address: str) -> str:
    return address.partition("%")[0]


def is_loopback(address: str | None) -> bool:
    """Whether only this machine can reach an address. One that is unknown counts as well: gloo then takes loopback."""
    return address is None or ipaddress.ip_address(address).is_loopback


def main() -> None:
    """Print the address and the interface, or exit with an error line."""
    master_addr, *port = sys.argv[1:]
    route = find_route(master_addr)
    if route is None:
        sys.exit(f"MASTER_ADDR {master_addr} is unreachable")
    # A refusal is an answer: the program on node 0 may not have started yet.
    number = int(port[0]) if port and port[0].isdecimal() else None  # torchrun reports a wrong one
    if number and (problem := connection_problem(master_addr, number)) and not problem.startswith("refused"):
        print(f"warning: MASTER_ADDR {master_addr}, MASTER_PORT {number}: {problem}", file=sys.stderr)
    print(*route)


if __name__ == "__main__":
    main()
