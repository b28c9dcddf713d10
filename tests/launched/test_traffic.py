"""Ranks that exchange gradients and parameters call exactly the collectives that app.plan predicts."""

from __future__ import annotations

import json

import pytest
from helpers.jobs import PROJECT, forked_job

pytestmark = [pytest.mark.launched, pytest.mark.slow]


@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(2, 2), (4, 4), (4, 2)])
def test_predicted_bytes_equal_counted_bytes(tmp_path, ranks, ranks_per_node):
    program, result = PROJECT / "tests" / "launched" / "count_traffic.py", tmp_path / "result.json"
    variables = {"RESULT": str(result), "RANKS_PER_NODE": str(ranks_per_node)}
    with forked_job(str(program), "--use_cpu", "--threads=1", cwd=tmp_path, ranks=ranks, **variables) as job:
        done = job.finish()
    assert done.status == 0, done.err
    assert json.loads(result.read_text()) == {"steps": 19, "wrong": [{}] * ranks}
