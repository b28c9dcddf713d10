"""Which interface other nodes can reach. tests/launched/test_multi_node.py starts jobs on such nodes."""

from __future__ import annotations

import os
from types import SimpleNamespace

import psutil
import pytest

from app.distributed import network
from app.distributed.network import FAMILIES, find_route, use_reachable_interface

ADDRESSES = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "10.9.0.5", "docker0": "172.17.0.1"}


@pytest.fixture
def node(monkeypatch):
    """Make this machine one with some interfaces, and own addresses from which it reaches node-0 and the internet."""

    def become(own: str | None, interfaces: tuple[str, ...] = tuple(ADDRESSES), default: str | None = None) -> None:
        hardware = SimpleNamespace(family=-1, address="00:00")
        addresses = {
            name: [SimpleNamespace(family=FAMILIES[0], address=ADDRESSES[name]), hardware] for name in interfaces
        }
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
        monkeypatch.setattr(network, "_own_address", {"node-0": own, "192.0.2.1": default}.get)

    return become


@pytest.mark.parametrize(
    ("own", "interfaces", "default", "route"),
    [
        ("10.9.0.5", tuple(ADDRESSES), None, ("10.9.0.5", "ib0")),
        # Node 0's own name leads to loopback: the default route decides, and without one the order of the interfaces.
        ("127.0.0.1", tuple(ADDRESSES), "10.9.0.5", ("10.9.0.5", "ib0")),
        ("127.0.0.1", tuple(ADDRESSES), None, ("10.0.0.5", "eth0")),
        ("127.0.0.1", ("lo",), None, ("127.0.0.1", "lo")),
        (None, tuple(ADDRESSES), None, None),
    ],
)
def test_the_route_to_node_0_selects_the_interface(node, own, interfaces, default, route):
    node(own, interfaces, default)
    assert find_route("node-0") == route


@pytest.mark.parametrize("chosen", ["", "eth7"])
def test_gloo_gets_the_interface_that_leads_to_node_0_unless_the_user_set_one(node, monkeypatch, chosen):
    node("10.9.0.5")
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    use_reachable_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == (chosen or "ib0")


def test_this_machine_has_a_route_to_itself_and_none_to_a_host_that_does_not_exist():
    assert find_route("127.0.0.1") is not None
    assert find_route("nowhere.invalid") is None
    assert find_route("." * 100) is None
