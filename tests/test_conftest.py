"""What conftest.py does for all tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.slow
def test_tests_of_signals_pass_where_the_shell_ignores_signals():
    """`nohup pytest … &` starts with SIGINT and SIGHUP ignored."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "signal or interrupted", "-m", ""]
    command += [TESTS / "distributed/test_launcher.py", TESTS / "test_setup_script.py", TESTS / "data/test_download.py"]
    done = subprocess.run(
        ["bash", "-c", "trap '' INT HUP; exec \"$@\"", "bash", *command], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
