"""Faults at exact moments: what must not be lost, overwritten, or half-written, on both training paths."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers.architectures import write_model
from helpers.jobs import PROJECT, SAMPLE_CSV, Job, count_steps, read_steps, unavailable

from app.runs.reader import read_run

pytestmark = [pytest.mark.launched, pytest.mark.slow]
PATHS = ("ddp_loop", "trainer_run")
FAULTY = str(PROJECT / "tests" / "launched" / "faulty.py")
SMALL = ["--csv", SAMPLE_CSV, "--model=bert", "--max_length=32", "--train_batch_size=12", "--eval_strategy=no"]
SMALL += ["--use_cpu", "--threads=1", "--disable_tqdm", "--output_dir=run"]
BRIEF = [*SMALL, "--max_steps=3", "--save_strategy=no"]
# Step 5 has a checkpoint and an evaluation of 30 batches on each of two ranks.
EVALUATED = [*SMALL, "--max_steps=9", "--save_strategy=steps", "--save_steps=5", "--validation_size=0.1"]
EVALUATED += ["--eval_strategy=steps", "--eval_steps=5", "--eval_batch_size=4", "--load_best_model_at_end"]


@pytest.fixture
def start(tmp_path) -> Callable[..., Job]:
    """Start a program in the test's folder, whose runs are in `run` and train the model `bert`."""
    write_model(tmp_path / "bert", "bert")

    def job(program: str, *flags: Any, **options: Any) -> Job:
        return Job(program, *flags, "--cache_dir=cache", cwd=tmp_path, **options)

    return job


def content_of(folder: Path) -> dict[str, bytes | None]:
    """Every file's bytes, by its path; None for a folder."""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


# ---- folders of other jobs ---------------------------------------------------------------------------------------


def test_a_restart_after_a_refusal_leaves_the_folder_as_it_was(start, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "settings.json").write_text('{"editor.fontSize": 12}')
    (tmp_path / "run" / "notes.txt").write_text("of another program")
    before = content_of(tmp_path / "run")
    with start("trainer_run", *BRIEF, ranks=1, torchrun_flags=("--standalone", "--max-restarts=1")) as job:
        done = job.finish()
    assert done.status != 0
    assert {"--output_dir run" in line for line in done.error_lines} == {True}, done.err
    assert content_of(tmp_path / "run") == before


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "after the other has finished"])
def test_one_of_two_jobs_that_create_the_same_folder_is_refused(start, tmp_path, at_once):
    """Each has found that the folder does not exist."""
    run, barrier = tmp_path / "run", tmp_path / "barrier"
    barrier.mkdir()
    variables = {"RUN": str(run), "BARRIER": str(barrier), "PARTIES": "2"}
    other = (FAULTY, "ddp_loop", "wait_before_mkdir") if at_once else ("ddp_loop",)
    with start(FAULTY, "trainer_run", "wait_before_mkdir", *BRIEF, ranks=0, **variables) as late:
        late.wait_for(lambda: any(barrier.iterdir()))
        with start(*other, *BRIEF, ranks=0, **variables) as job:
            finished = [job.finish()]
        if not at_once:
            assert finished[0].status == 0, finished[0].err
            before = content_of(run)
            (barrier / "continue").touch()
        finished.append(late.finish())
    statuses = [done.status for done in finished]
    assert sorted(statuses) == [0, 2], finished
    (line,) = finished[statuses.index(2)].error_lines
    assert line.startswith(("error: --output_dir run: ", "error: run: ")), line
    assert at_once or content_of(run) == before
    assert read_run(run).settings["path"] == PATHS[statuses.index(0)]
    assert [step["step"] for step in read_steps(run)] == [1, 2, 3]
    assert not list(run.glob(".*.tmp"))


# ---- disks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path_name", "then"), [("ddp_loop", "continue"), ("trainer_run", "continue"), ("ddp_loop", "stop")]
)
def test_a_completely_full_disk(start, mount, path_name, then):
    disk = mount("size=64m")
    run = disk / "run"
    flags = [*SMALL, "--max_steps=50", "--logging_steps=1", "--save_strategy=steps", "--save_steps=10"]
    flags += ["--eval_strategy=steps", "--eval_steps=15", f"--on_save_failure={then}", f"--output_dir={run}"]
    # The disk is full for 40 steps, whose log lines need more space than the last block of the file has left.
    variables = {"FILLER": str(disk / "filler"), "FROM": "5", "TO": "45"}
    # With --on_save_failure stop, a log that rank 0 cannot write ends the other rank as well.
    with start(FAULTY, path_name, "fill_disk", *flags, ranks=0 if then == "continue" else 2, **variables) as job:
        done = job.finish()
    if then == "stop":
        assert done.status == 1
        (line,) = done.error_lines
        assert "No space left" in line
        return
    assert done.status == 0, done.err
    assert any("No space left" in line for line in done.out.splitlines() if line.startswith("warning: ")), done.out
    assert [step["step"] for step in read_steps(run)] == list(range(1, 51))
    assert pd.read_json(run / "evaluations.jsonl", lines=True)["step"].tolist() == [15, 30, 45, 50]
    # Others may exist: a tmpfs counts its free pages per CPU, so a small file may still fit into one that is full.
    assert (run / "checkpoints" / "checkpoint-50" / "run_state.json").is_file()
    read_run(run)


def test_a_read_only_home_works_or_is_one_line(start, mount, tmp_path):
    home = str(mount("ro"))
    places = {"HOME": home, "XDG_CACHE_HOME": home, "HF_HOME": f"{home}/hf", "HF_MODULES_CACHE": f"{home}/hf/modules"}
    with start("ddp_loop", *BRIEF, ranks=0, **places) as job:
        done = job.finish()
    if done.status == 0:
        assert count_steps(tmp_path / "run") == 3
    else:
        assert len(done.error_lines) == 1, done.err
        assert done.err.splitlines() == done.error_lines
        assert not (tmp_path / "run").exists()


def test_ranks_that_do_not_share_the_output_folder_are_refused(start, tmp_path):
    """Simulate two nodes: the second one has its own empty disk at the path of the output folder."""
    place = tmp_path / "disk"
    place.mkdir()
    own_disk = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"', str(place)]
    try:
        subprocess.run([*own_disk, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as refusal:
        unavailable(f"needs root to mount a tmpfs in a mount namespace: {refusal}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def node(rank: int) -> Job:
        torchrun_flags = ["--nnodes=2", f"--node_rank={rank}", "--master_addr=127.0.0.1", f"--master_port={port}"]
        flags = [*BRIEF, "--save_strategy=epoch", f"--output_dir={place / 'run'}"]
        return start("ddp_loop", *flags, ranks=1, torchrun_flags=torchrun_flags, prefix=own_disk if rank == 1 else [])

    with node(0) as first, node(1) as second:
        done = [first.finish(), second.finish()]
    assert 0 not in [node.status for node in done], done[0].out
    (line,) = [line for node in done for line in node.error_lines]
    assert "--output_dir" in line
    assert not list(place.rglob("steps.jsonl"))
    assert not list(place.rglob("model*"))


# ---- requests to stop ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path_name", PATHS)
def test_a_rank_asked_to_stop_in_an_evaluation_ends_with_75_and_a_checkpoint(start, tmp_path, path_name):
    with start(FAULTY, path_name, "terminate", *EVALUATED) as job:
        done = job.finish()
    assert "exitcode  : 75" in done.err
    (line,) = (line for line in done.err.splitlines() if line.startswith("stopped: after step "))
    step = int(line.split()[3])
    assert 5 <= step < 9
    assert count_steps(tmp_path / "run") == step
    assert (tmp_path / "run" / "checkpoints" / f"checkpoint-{step}" / "run_state.json").is_file()
    assert not (tmp_path / "run" / "metrics.json").exists()


# tests/distributed/test_preemption.py tests a single rank while it writes.
@pytest.mark.parametrize("path_name", PATHS)
@pytest.mark.parametrize(("fault", "ranks"), [("terminate_at_model", 2), ("terminate_at_the_end", 0)])
def test_ranks_that_are_asked_to_stop_at_the_end_of_a_run_finish_it(start, tmp_path, path_name, fault, ranks):
    with start(FAULTY, path_name, fault, *BRIEF, ranks=ranks) as job:
        done = job.finish()
    assert (done.status, done.error_lines) == (0, []), done.err
    assert fault == "terminate_at_model" or "rank 0 is sent SIGTERM" in done.out
    read_run(tmp_path / "run")
