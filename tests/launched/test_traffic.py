"""Ranks that exchange gradients and parameters call exactly the collectives that app.plan predicts."""

from __future__ import annotations

import json
import os

import pytest
from jobs import PROJECT

pytestmark = [pytest.mark.launched, pytest.mark.slow]


@pytest.mark.parametrize("ranks", [2, 4])
def test_predicted_bytes_equal_counted_bytes(launch, tmp_path, ranks):
    program, result = PROJECT / "tests" / "launched" / "count_traffic.py", tmp_path / "result.json"
    path = os.pathsep.join([str(PROJECT), str(PROJECT / "tests")])
    done = launch(str(program), "--use_cpu", "--threads=1", ranks=ranks, RESULT=str(result), PYTHONPATH=path)
    assert done.status == 0, done.err
    assert json.loads(result.read_text()) == {"steps": 25, "wrong": {}}
