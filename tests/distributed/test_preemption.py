"""Stop requests in this process. The launched tests send signals to real ranks."""

from __future__ import annotations

import os
import signal
from unittest.mock import Mock

import pytest

from app.distributed import preemption
from app.distributed.preemption import SIGNALS, StopRequest


@pytest.mark.parametrize(("number", "is_ignored"), [("SIGUSR1", False), ("SIGHUP", False), ("SIGHUP", True)])
def test_a_signal_is_a_request_one_step_later_unless_nohup_ignores_it(world, number, is_ignored):
    signal.signal(signal.Signals[number], signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    with StopRequest(world) as stop:
        os.kill(os.getpid(), signal.Signals[number])
        assert [stop.requested(), stop.requested()] == [False, not is_ignored]
    assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_IGN] * len(SIGNALS)


def test_only_a_second_request_ends_the_process(world, monkeypatch):
    monkeypatch.setattr(preemption.os, "_exit", Mock(side_effect=SystemExit))
    with StopRequest(world):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)  # torchrun forwards the first request, too
        monkeypatch.setattr(preemption, "SAME_REQUEST_SECONDS", -1.0)
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
    preemption.os._exit.assert_called_once_with(143)
