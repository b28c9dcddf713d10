"""Stop requests in this process. The launched tests send signals to real ranks."""

from __future__ import annotations

import os
import signal
import threading

from app.distributed import preemption
from app.distributed.preemption import SIGNALS, StopRequest


def test_nothing_of_a_stop_request_outlives_its_context(world):
    threads, handlers = threading.enumerate(), [signal.getsignal(number) for number in SIGNALS]
    for _ in range(20):
        with StopRequest(world) as stop:
            assert not stop.requested()
            assert threading.active_count() == len(threads) + 1
        assert threading.enumerate() == threads
        assert [signal.getsignal(number) for number in SIGNALS] == handlers


def test_a_finished_run_ignores_the_signals_if_its_process_exits_next(world):
    handlers = [signal.getsignal(number) for number in SIGNALS]
    try:
        with StopRequest(world, ignore_afterwards=True):
            pass
        assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_IGN] * len(SIGNALS)
    finally:
        for number, handler in zip(SIGNALS, handlers, strict=True):
            signal.signal(number, handler)


def test_a_signal_is_reported_one_step_later(world):
    with StopRequest(world) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        while not stop.received:
            stop.listener.join(0.01)
        assert not stop.requested()
        assert stop.requested()


def test_signals_that_other_code_handles_are_no_requests_to_stop(world, monkeypatch):
    """Nor does one of them end the process, as a second request does."""
    monkeypatch.setattr(preemption, "SAME_REQUEST_SECONDS", -1.0)
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        with StopRequest(world) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.listener.is_alive(), "it has read everything"
        assert not stop.received
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_stop_request_inside_another_one_returns_the_signals_to_it(world):
    """As when a run that has failed is resumed in the same process."""
    with StopRequest(world) as outer:
        with StopRequest(world):
            pass
        os.kill(os.getpid(), signal.SIGUSR1)
        while not outer.received:
            outer.listener.join(0.01)
