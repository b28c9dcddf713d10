"""Two nodes on one machine: what they need, and how packets are forwarded between them."""

from __future__ import annotations

import math
import os
import socket
import subprocess
from contextlib import contextmanager

import pytest

from app.bench import two_nodes
from app.bench.two_nodes import Direction, Link, NamespacesUnavailable, network_namespaces


def test_without_iproute2_it_says_so(monkeypatch):
    monkeypatch.setattr(two_nodes, "SYSTEM_PATH", "/nowhere")
    with pytest.raises(NamespacesUnavailable, match=r"need Linux with iproute2"), network_namespaces():
        pass


def test_a_command_that_fails_is_one_line_that_says_which(monkeypatch):
    @contextmanager
    def two_namespaces():
        yield ["a", "b"]

    def refuse(command):
        raise subprocess.CalledProcessError(1, command, stderr="RTNETLINK answers:\nnot permitted\n")

    monkeypatch.setattr(two_nodes, "network_namespaces", two_namespaces)
    monkeypatch.setattr(two_nodes, "run_command", refuse)
    monkeypatch.setattr(two_nodes, "_create_tun", lambda name, stack: stack.enter_context(socket.socket()).fileno())
    problem = r"^two nodes on one machine need a link between them: RTNETLINK answers: not permitted$"
    with pytest.raises(NamespacesUnavailable, match=problem), two_nodes.two_nodes(Link(1, 1)):
        pass
    monkeypatch.setattr(two_nodes.shutil, "which", lambda *_, **__: "ip")
    with pytest.raises(NamespacesUnavailable, match="need network namespaces: RTNETLINK"), network_namespaces():
        pass


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(two_nodes, "time", clock)
    return clock


@pytest.fixture
def link():
    """A direction between two sockets that keep packets apart, as TUN devices do: (sender, direction, receiver)."""
    sender, source = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    target, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for one in (sender, source, target, receiver):
        one.setblocking(False)
    yield sender, Direction(source.fileno(), target.fileno(), Link(8e-6, 5000)), receiver
    for one in (sender, source, target, receiver):
        one.close()


def received(receiver: socket.socket) -> list[bytes]:
    packets = []
    while True:
        try:
            packets.append(os.read(receiver.fileno(), 65_535))
        except BlockingIOError:
            return packets


def test_a_packet_arrives_after_its_transmission_and_the_delay(clock, link):
    sender, direction, receiver = link
    sender.send(b"x" * 1000)
    direction.receive()
    assert direction.seconds_to_next() == pytest.approx(6.0)
    clock.now += 5.9
    direction.deliver()
    assert received(receiver) == []
    clock.now += 0.2
    direction.deliver()
    assert received(receiver) == [b"x" * 1000]
    assert direction.seconds_to_next() == math.inf


def test_packets_are_transmitted_one_after_another_and_keep_their_order(clock, link):
    sender, direction, receiver = link
    for content in (b"a", b"b", b"c"):
        sender.send(content * 1000)
    direction.receive()
    arrived = []
    for _ in range(9):
        clock.now += 1.0
        direction.deliver()
        arrived.append("".join(packet[:1].decode() for packet in received(receiver)))
    assert arrived == ["", "", "", "", "", "a", "b", "c", ""], "delays overlap, transmissions do not"


def test_an_idle_link_does_not_make_up_for_lost_time(clock, link):
    sender, direction, _ = link
    sender.send(b"x" * 1000)
    direction.receive()
    clock.now += 50.0
    direction.deliver()
    sender.send(b"x" * 1000)
    direction.receive()
    assert direction.seconds_to_next() == pytest.approx(6.0)
