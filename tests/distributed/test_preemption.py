"""Stop requests in this process. The launched tests send signals to real ranks."""

from __future__ import annotations

import os
import signal
import threading

from app.distributed.preemption import SIGNALS, StopRequest


def test_nothing_of_a_stop_request_outlives_its_context(world):
    threads, handlers = threading.enumerate(), [signal.getsignal(number) for number in SIGNALS]
    for _ in range(20):
        with StopRequest(world) as stop:
            assert not stop.requested()
            assert threading.active_count() == len(threads) + 1
        assert threading.enumerate() == threads
        assert [signal.getsignal(number) for number in SIGNALS] == handlers


def test_a_signal_is_reported_one_step_later(world):
    with StopRequest(world) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        while not stop.received:
            stop.listener.join(0.01)
        assert not stop.requested()
        assert stop.requested()
