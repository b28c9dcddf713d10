"""Which interface other nodes can reach. tests/launched/test_multi_node.py starts jobs on such nodes."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from app.distributed import network
from app.distributed.network import find_route, use_reachable_interface

ADDRESSES = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "10.9.0.5", "docker0": "172.17.0.1"}


@pytest.fixture
def node(monkeypatch):
    """A function that makes this machine one with these routes: the own address for each destination."""
    for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)

    def become(routes: dict[str, str], interfaces: tuple[str, ...] = tuple(ADDRESSES)) -> None:
        family = socket.AF_INET
        addresses = {
            name: [SimpleNamespace(family=family, address=address), SimpleNamespace(family=-1, address="00:00")]
            for name, address in ADDRESSES.items()
            if name in interfaces
        }
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
        monkeypatch.setattr(network, "_own_address", routes.get)

    return become


def test_the_route_to_node_0_selects_the_interface(node):
    node({"node-0": "10.9.0.5"})
    assert find_route("node-0") == ("10.9.0.5", "ib0")
    assert find_route("nowhere") is None


def test_on_node_0_whose_name_is_a_loopback_address_it_is_the_first_other_interface(node):
    node({"node-0": "127.0.0.1"})
    assert find_route("node-0") == ("10.0.0.5", "eth0")


def test_on_node_0_the_default_route_comes_before_the_order_of_the_interfaces(node):
    node({"node-0": "127.0.0.1", "192.0.2.1": "10.9.0.5"})
    assert find_route("node-0") == ("10.9.0.5", "ib0")


def test_a_machine_without_a_network_uses_loopback(node):
    node({"node-0": "127.0.0.1"}, interfaces=("lo",))
    assert find_route("node-0") == ("127.0.0.1", "lo")


@pytest.mark.parametrize("chosen", [None, "eth7"])
def test_gloo_gets_the_interface_that_leads_to_node_0_unless_the_user_set_one(node, monkeypatch, chosen):
    node({"node-0": "10.9.0.5"})
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    if chosen is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    use_reachable_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == (chosen or "ib0")


def test_the_address_of_this_machine_is_that_of_the_route():
    assert network._own_address("127.0.0.1") == "127.0.0.1"
    assert network._own_address("nowhere.invalid") is None
    assert network._own_address("." * 100) is None
