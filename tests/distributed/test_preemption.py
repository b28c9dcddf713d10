"""Stop requests in this process. The launched tests send signals to real ranks."""

from __future__ import annotations

import os
import signal
import threading

from app.distributed import preemption
from app.distributed.preemption import SIGNALS, StopRequest


def test_no_thread_of_a_stop_request_outlives_its_context_and_a_finished_run_ignores_the_signals(world):
    threads = threading.enumerate()
    for _ in range(20):
        with StopRequest(world) as stop:
            assert not stop.requested()
            assert threading.active_count() == len(threads) + 1
        assert threading.enumerate() == threads
        assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_IGN] * len(SIGNALS)


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
