"""Two nodes on one machine: what they need, and how packets are forwarded between them."""

from __future__ import annotations

import math
import os
import socket
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest

from app.bench import two_nodes
from app.bench.two_nodes import Direction, Link, NamespacesUnavailable, network_namespaces


def test_what_two_nodes_lack_is_one_line(monkeypatch):
    run_command, refusal = two_nodes.run_command, "echo 'RTNETLINK answers:' >&2; echo 'not permitted' >&2; exit 1"

    def enter(line):
        with pytest.raises(NamespacesUnavailable, match=f"^two nodes on one machine need {line}"), network_namespaces():
            pass

    monkeypatch.setattr(two_nodes.shutil, "which", lambda *_, path: None)
    enter("Linux with iproute2")
    monkeypatch.setattr(two_nodes.shutil, "which", lambda *_, path: "ip")
    monkeypatch.setattr(two_nodes, "run_command", lambda _: run_command(["sh", "-c", refusal]))
    enter("network namespaces: RTNETLINK answers: not permitted$")


def test_packets_arrive_in_order_after_their_transmission_and_the_delay(monkeypatch):
    """Delays overlap, transmissions do not, and an idle link does not make up for lost time."""
    clock, arrived = SimpleNamespace(now=100.0, monotonic=lambda: clock.now), {}
    monkeypatch.setattr(two_nodes, "time", clock)
    with ExitStack() as stack:
        # Sockets that keep packets apart, as TUN devices do.
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
        for one in (*pairs[0], *pairs[1]):
            one.setblocking(False)
            stack.callback(one.close)
        (sender, source), (target, receiver) = pairs
        direction = Direction(source.fileno(), target.fileno(), Link(8e-6, 5000))  # 1000 bytes per second
        for tenths in range(600):
            clock.now = 100 + tenths / 10
            for content in {0: "abc", 500: "d"}.get(tenths, ""):
                sender.send(content.encode() * 1000)
            direction.receive()
            if tenths == 500:
                assert direction.seconds_to_next() == pytest.approx(6.0)
            direction.deliver()
            with suppress(BlockingIOError):  # none has arrived
                packet = os.read(receiver.fileno(), 65_535)
                assert len(packet) == 1000
                arrived[packet[:1].decode()] = tenths / 10
    assert "".join(arrived) == "abcd"
    assert arrived == pytest.approx({"a": 6, "b": 7, "c": 8, "d": 56}, abs=0.11)
    assert direction.seconds_to_next() == math.inf
