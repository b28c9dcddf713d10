"""Progress bars on a terminal. tests/launched/test_paths.py checks that none is written to a file."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest
from helpers.jobs import LIMIT, PROJECT, SAMPLE_CSV

from app.distributed.launcher import torchrun_command

pytestmark = [pytest.mark.launched, pytest.mark.slow]


@pytest.mark.skipif(sys.platform != "linux", reason="`script` has other options elsewhere")
@pytest.mark.parametrize("path", ["ddp_loop", "trainer_run"])
def test_a_bar_appears_on_a_terminal(tmp_path, path):
    flags = ["--csv", SAMPLE_CSV, "--use_cpu", "--threads=1", "--max_length=8", "--max_steps=2", "--eval_strategy=no"]
    command = torchrun_command(f"app.{path}", [*flags, "--save_strategy=no"], nproc_per_node=0)
    # `script` gives a command a terminal, which has no size at first, so no room for a bar.
    on_terminal = ["script", "-qec", f"stty rows 24 cols 100; exec {shlex.join(command)} >/dev/null", "/dev/null"]
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": LIMIT}
    done = subprocess.run(on_terminal, stdin=subprocess.DEVNULL, **options)
    assert done.returncode == 0, done.stdout
    assert "2/2 [" in done.stdout, "two of two steps"
