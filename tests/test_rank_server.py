"""A job of the rank server leaves nothing behind. That it is like real processes is shown by all launched tests."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from helpers.jobs import Job

pytestmark = pytest.mark.launched
ORPHAN = "import signal, subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"


def job_of(text: str, folder: Path, ranks: int) -> Job:
    (folder / "script.py").write_text(text)
    return Job(str(folder / "script.py"), cwd=folder, ranks=ranks)


def test_a_job_that_hangs_reaches_its_limit_and_is_killed_with_all_that_it_started(tmp_path):
    with job_of(f"{ORPHAN}; signal.pause()", tmp_path, ranks=2) as job:
        job.wait_for(lambda: len(job.processes()) == 5)  # the agent, two ranks and what they started
        processes = job.processes()
        with pytest.raises(AssertionError, match="timed out after 1 seconds"):
            job.finish(1)
    assert psutil.wait_procs(processes, timeout=30)[1] == []


def test_a_process_that_a_job_leaves_behind_is_found_and_killed(tmp_path):
    with job_of(ORPHAN, tmp_path, ranks=0) as job:
        with pytest.raises(AssertionError, match="left processes behind"):
            job.finish(60, patience=1)
        assert job.processes() == []
