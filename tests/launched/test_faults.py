"""Faults at exact moments: what must not be lost, overwritten, or half-written, on both training paths."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from helpers.architectures import write_model
from helpers.jobs import PROJECT, SAMPLE_CSV, Finished, Job, unavailable

from app.runs.reader import read_run

pytestmark = pytest.mark.launched
PATHS = ("ddp_loop", "trainer_run")
FAULTY = str(PROJECT / "tests" / "launched" / "faulty.py")
SMALL = [
    *("--csv", SAMPLE_CSV, "--model", "bert", "--max_length", 32, "--train_batch_size", 12, "--eval_strategy", "no"),
    *("--use_cpu", "--threads", 1, "--disable_tqdm"),
]
BRIEF = [*SMALL, "--max_steps", 3, "--save_strategy", "no"]
EVALUATED = [  # step 5 has a checkpoint and an evaluation of 30 batches on each of two ranks
    *(*SMALL, "--max_steps", 9, "--save_strategy", "steps", "--save_steps", 5, "--validation_size", 0.1),
    *("--eval_strategy", "steps", "--eval_steps", 5, "--eval_batch_size", 4, "--load_best_model_at_end"),
]
RESTART = ("--standalone", "--max-restarts=1")


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A folder for a finished run, a model and the token cache."""
    folder = tmp_path_factory.mktemp("faults")
    write_model(folder / "bert", "bert")
    return folder


@pytest.fixture(scope="module")
def finished(shared) -> Path:
    """A finished run. Tests that change it copy it first."""
    done = run("ddp_loop", *BRIEF, "--output_dir", shared / "finished", shared=shared, ranks=0)
    assert done.status == 0, done.err
    return shared / "finished"


def start(program: str, *flags, shared: Path, **more) -> Job:
    return Job(program, *flags, "--cache_dir", shared / "cache", cwd=shared, **more)


def run(program: str, *flags, shared: Path, **more) -> Finished:
    with start(program, *flags, shared=shared, **more) as job:
        return job.finish()


def content_of(folder: Path) -> dict[str, bytes | None]:
    """Every file's bytes, by its path; None for a folder."""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def steps_of(folder: Path, log: str = "steps.jsonl") -> list[int]:
    return [json.loads(line)["step"] for line in (folder / log).read_text().splitlines()]


# ---- folders of other jobs ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_restart_after_a_refusal_leaves_the_folder_as_it_was(finished, shared, tmp_path):
    shutil.copytree(finished, tmp_path / "finished")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "settings.json").write_text('{"editor.fontSize": 12}')
    (tmp_path / "foreign" / "notes.txt").write_text("of another program")
    before = content_of(tmp_path)
    flags = [*SMALL, "--max_steps", 5, "--seed", 7, "--save_strategy", "no"]

    def refused(path_name: str, folder: str) -> Job:
        output = ["--output_dir", tmp_path / folder]
        return start(path_name, *flags, *output, shared=shared, ranks=1, torchrun_flags=RESTART)

    with refused("ddp_loop", "finished") as one, refused("trainer_run", "foreign") as other:
        for folder, job in (("finished", one), ("foreign", other)):
            done = job.finish()
            assert done.status != 0, f"{folder}:\n{done.out}"
            assert {folder in line for line in done.error_lines} == {True}, done.err
    assert content_of(tmp_path) == before


@pytest.mark.slow
def test_one_of_two_jobs_that_create_the_same_folder_at_once_is_refused(shared, tmp_path):
    folder, barrier = tmp_path / "run", tmp_path / "barrier"
    barrier.mkdir()
    environment = {"RUN": str(folder), "BARRIER": str(barrier), "PARTIES": "2"}
    flags = [*BRIEF, "--output_dir", folder]
    # Both find that the folder does not exist, and then create it in the same millisecond.
    with (
        start(FAULTY, PATHS[0], "wait_before_mkdir", *flags, shared=shared, ranks=0, **environment) as one,
        start(FAULTY, PATHS[1], "wait_before_mkdir", *flags, shared=shared, ranks=0, **environment) as other,
    ):
        done = [one.finish(), other.finish()]
    winner = PATHS[[job.status for job in done].index(0)]
    done.sort(key=lambda job: job.status)
    assert [job.status for job in done] == [0, 2], done
    assert done[1].err.splitlines() == done[1].error_lines
    assert len(done[1].error_lines) == 1
    assert str(folder) in done[1].error_lines[0]
    found = read_run(folder)
    assert steps_of(folder) == [1, 2, 3]
    assert found.settings["path"] == winner
    assert not list(folder.glob(".*.tmp"))


@pytest.mark.slow
def test_a_job_that_creates_its_folder_after_another_has_finished_there_is_refused(shared, tmp_path):
    folder, barrier = tmp_path / "run", tmp_path / "barrier"
    barrier.mkdir()
    environment = {"RUN": str(folder), "BARRIER": str(barrier), "PARTIES": "2"}
    flags = [*BRIEF, "--output_dir", folder]
    with start(FAULTY, "trainer_run", "wait_before_mkdir", *flags, shared=shared, ranks=0, **environment) as late:
        late.wait_for(lambda: any(barrier.iterdir()))  # it has found that the folder does not exist
        done = run("ddp_loop", *flags, shared=shared, ranks=0)
        assert done.status == 0, done.err
        before = content_of(folder)
        (barrier / "continue").touch()
        refused = late.finish()
    assert refused.status == 2, refused.out
    assert len(refused.error_lines) == 1, refused.err
    assert str(folder) in refused.error_lines[0]
    assert content_of(folder) == before


# ---- disks -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path_name", "then"),
    [
        ("ddp_loop", "continue"),
        ("trainer_run", "continue"),
        ("ddp_loop", "stop"),
    ],
)
def test_a_completely_full_disk(shared, mount, path_name, then):
    disk = mount("size=64m")
    flags = [*SMALL, "--max_steps", 50, "--logging_steps", 1, "--save_strategy", "steps", "--save_steps", 10]
    flags += ["--eval_strategy", "steps", "--eval_steps", 15, "--on_save_failure", then, "--output_dir", disk / "run"]
    # The disk is full for 40 steps, whose log lines need more space than the last block of the file has left.
    environment = {"FILLER": str(disk / "filler"), "FROM": "5", "TO": "45"}
    done = run(FAULTY, path_name, "fill_disk", *flags, shared=shared, ranks=0, **environment)
    if then == "continue":
        assert done.status == 0, done.err
        assert any("No space left" in line for line in done.out.splitlines() if line.startswith("warning: ")), done.out
        assert steps_of(disk / "run") == list(range(1, 51))
        assert steps_of(disk / "run", "evaluations.jsonl") == [15, 30, 45, 50]
        assert (disk / "run" / "checkpoints" / "checkpoint-50" / "run_state.json").is_file()
        read_run(disk / "run")
    else:
        assert done.status == 1
        assert len(done.error_lines) == 1, done.err
        assert "No space left" in done.error_lines[0]


@pytest.mark.slow
def test_a_read_only_home_works_or_is_one_line(shared, mount, tmp_path):
    home = str(mount("ro"))
    places = {"HOME": home, "XDG_CACHE_HOME": home, "HF_HOME": f"{home}/hf", "HF_MODULES_CACHE": f"{home}/hf/modules"}
    done = run("ddp_loop", *BRIEF, "--output_dir", tmp_path / "run", shared=shared, ranks=0, **places)
    if done.status == 0:
        assert steps_of(tmp_path / "run") == [1, 2, 3]
        read_run(tmp_path / "run")
    else:
        assert len(done.error_lines) == 1, done.err
        assert done.err.splitlines() == done.error_lines
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ranks_that_do_not_share_the_output_folder_are_refused(shared, tmp_path):
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
        prefix = own_disk if rank == 1 else []
        flags = [*BRIEF, "--save_strategy", "epoch", "--output_dir", place / "run"]
        return start("ddp_loop", *flags, shared=shared, ranks=1, torchrun_flags=torchrun_flags, prefix=prefix)

    with node(0) as first, node(1) as second:
        done = [first.finish(), second.finish()]
    assert 0 not in [node.status for node in done], done[0].out
    lines = [line for node in done for line in node.error_lines]
    assert len(lines) == 1, lines
    assert "--output_dir" in lines[0]
    assert not list(place.rglob("steps.jsonl"))
    assert not list(place.rglob("model*"))


# ---- evaluations -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("path_name", PATHS)
def test_a_rank_asked_to_stop_in_an_evaluation_ends_with_75_and_a_checkpoint(shared, tmp_path, path_name):
    folder = tmp_path / "run"
    done = run(FAULTY, path_name, "terminate", *EVALUATED, "--output_dir", folder, shared=shared)
    assert "exitcode  : 75" in done.err
    (line,) = (line for line in done.err.splitlines() if line.startswith("stopped: after step "))
    step = int(line.split()[3])
    assert 5 <= step < 9
    assert steps_of(folder) == list(range(1, step + 1))
    assert (folder / "checkpoints" / f"checkpoint-{step}" / "run_state.json").is_file()
    assert not (folder / "metrics.json").exists()


@pytest.mark.slow  # tests/distributed/test_preemption.py tests a single rank
@pytest.mark.parametrize("path_name", PATHS)
def test_ranks_that_are_asked_to_stop_while_the_model_is_written_finish(shared, tmp_path, path_name):
    done = run(FAULTY, path_name, "terminate_at_model", *BRIEF, "--output_dir", tmp_path / "run", shared=shared)
    assert done.status == 0, done.err
    assert not done.error_lines
    read_run(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("path_name", PATHS)
def test_a_rank_that_is_asked_to_stop_when_its_run_has_just_finished_finishes(shared, tmp_path, path_name):
    flags = [*BRIEF, "--output_dir", tmp_path / "run"]
    done = run(FAULTY, path_name, "terminate_at_the_end", *flags, shared=shared, ranks=0)
    assert "rank 0 is sent SIGTERM" in done.out
    assert done.status == 0, done.err
    read_run(tmp_path / "run")
