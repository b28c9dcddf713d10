"""The ranks of app.bench.scaling on fake GPUs: every task that they are asked for, under every strategy."""

from __future__ import annotations

import json
import socket
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from helpers.jobs import LIMIT, ON_FAKE_GPUS, Job, require_fake_gpus

from app.settings import STRATEGIES, WRAPPED_IN_DDP

pytestmark = [pytest.mark.launched, pytest.mark.slow]


def test_tasks_on_two_gpus(tmp_path: Path) -> None:
    require_fake_gpus()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    listener.listen()
    listener.settimeout(LIMIT)
    launcher = [ON_FAKE_GPUS, "--report", tmp_path / "report", "app.bench.scaling.job"]
    flags = ["--architecture=tiny", "--socket", tmp_path / "socket", "--train_batch_size=2", "--threads=1"]
    with listener, Job(*map(str, [*launcher, *flags]), cwd=tmp_path, ranks=2) as job:
        rank = Connection(listener.accept()[0].detach())
        for strategy in STRATEGIES:
            for exchange in (True, False):
                rank.send({"strategy": strategy, "exchange": exchange, "rows": 2, "length": 8, "steps": 2})
                result = rank.recv()
                assert result["seconds"] > 0
                ready = [at for _, at in result["buckets"]]
                assert bool(ready) == (strategy in WRAPPED_IN_DDP and not exchange)
                assert ready == sorted(ready)
                assert all(0 < at <= result["seconds"] for at in ready)
        for collective in ("all-reduce", "all-gather", "all-to-all", "broadcast"):
            rank.send({"collective": collective, "sizes": [64, 4096], "repeat": 3})
            assert [point["bytes"] for point in rank.recv()] == [64, 4096]
        rank.close()
        done = job.finish()
    assert done.status == 0, done.err
    reports = list((tmp_path / "report").iterdir())
    assert len(reports) == 2
    for report in reports:
        assert not json.loads(report.read_text())["races"]
