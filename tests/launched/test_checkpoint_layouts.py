"""A checkpoint is loaded bitwise under any strategy and number of ranks, on real process groups.

DCP promises no compatibility between its versions, and the shards are written by the project itself.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.jobs import PROJECT

pytestmark = pytest.mark.launched
LAYOUTS = ("ddp-1", "ddp-2", "zero1-2", "zero1-3", "zero2-2", "zero3-1", "zero3-3", "zero3-4", "zero3-7")
FAST = ["zero3-7->ddp-2", "ddp-1->zero3-4", "zero1-3->zero2-2", "zero3-4->zero1-2"]
ALL = [f"{saved_by}->{loaded_by}" for saved_by, loaded_by in itertools.product(LAYOUTS, LAYOUTS)]


@pytest.mark.parametrize("pairs", [FAST, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some pairs", "all pairs"])
def test_a_state_is_the_same_under_another_strategy_and_number_of_ranks(tmp_path, pairs):
    script = Path(__file__).with_name("checkpoint_layouts.py")
    command = [sys.executable, str(script), str(tmp_path), *pairs]
    environment = os.environ | {"FORKED_RANKS": "7", "PYTHONPATH": f"{PROJECT}:{PROJECT / 'tests'}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == len(pairs)
