"""Stop requests in this process. The launched tests send signals to real ranks."""

from __future__ import annotations

import os
import signal
from unittest.mock import Mock

import pytest

from app.distributed import preemption
from app.distributed.preemption import SIGNALS, StopRequest


def test_a_signal_is_reported_one_step_later_and_ignored_after_the_last_step(world):
    with StopRequest(world) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert [stop.requested(), stop.requested()] == [False, True]
    assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_IGN] * len(SIGNALS)


def test_a_hangup_is_a_request_unless_nohup_ignores_it(world):
    for ignored in (signal.SIG_DFL, signal.SIG_IGN):
        signal.signal(signal.SIGHUP, ignored)
        with StopRequest(world) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert [stop.requested(), stop.requested()] == [False, ignored is signal.SIG_DFL]


def test_only_a_second_request_ends_the_process(world, monkeypatch):
    monkeypatch.setattr(preemption.os, "_exit", Mock(side_effect=SystemExit))
    with StopRequest(world):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)  # torchrun forwards the first request, too
        monkeypatch.setattr(preemption, "SAME_REQUEST_SECONDS", -1.0)
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
    preemption.os._exit.assert_called_once_with(143)
