"""Progress bars on a terminal. tests/launched/test_paths.py checks that none is written to a file."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time

import pytest
from helpers.jobs import LIMIT, PROJECT, SAMPLE_CSV

from app.distributed.launcher import torchrun_command

pytestmark = [pytest.mark.launched, pytest.mark.slow]
BAR = b"2/2 ["  # two of two steps


@pytest.mark.parametrize("path", ["ddp_loop", "trainer_run"])
def test_a_bar_appears_on_a_terminal(tmp_path, path):
    flags = ["--csv", SAMPLE_CSV, "--use_cpu", "--threads=1", "--max_length=8", "--max_steps=2", "--eval_strategy=no"]
    command = torchrun_command(f"app.{path}", [*flags, "--save_strategy=no"], nproc_per_node=0)
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))  # a new one has no width, so no room
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    job = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=end)
    os.close(end)
    try:
        shown = read_all(terminal, LIMIT)
        assert job.wait(timeout=LIMIT) == 0, shown
    finally:
        job.kill()  # only if it is still running
        job.wait()
        os.close(terminal)
    assert BAR in shown


def read_all(terminal: int, limit: float) -> bytes:
    """Read what processes write to a terminal until the last one has closed it, for at most `limit` seconds."""
    shown, deadline = b"", time.monotonic() + limit
    while select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # Linux reports the end of a terminal as an error
            return shown
    raise AssertionError(f"not closed after {limit} s: {shown!r}")
