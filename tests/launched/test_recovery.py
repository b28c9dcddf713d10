"""Nothing is ever lost: real jobs are resumed, told to stop, starved of disk, frozen and killed."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from jobs import SAMPLE_CSV, Finished, Job, read_steps

pytestmark = pytest.mark.launched
PATHS = ("ddp_loop", "trainer_run")
STEPS = 24
SMALL = [
    *("--csv", SAMPLE_CSV, "--max_length", 48, "--train_batch_size", 12, "--max_steps", STEPS, "--use_cpu"),
    *("--save_strategy", "steps", "--save_steps", 5, "--save_total_limit", 9, "--disable_tqdm"),
]
FULL = [  # mid-epoch, mid-interval of evaluations, dropout on
    *SMALL,
    *("--gradient_accumulation_steps", 2, "--validation_size", 0.1, "--load_best_model_at_end"),
    *("--eval_strategy", "steps", "--eval_steps", 6, "--metric_for_best_model", "loss"),
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A folder for undisturbed runs and the token cache."""
    return tmp_path_factory.mktemp("recovery")


def run(road: str, folder: Path, shared: Path, *flags, ranks: int = 2, limit: float = 120) -> Finished:
    with start(road, folder, shared, *flags, ranks=ranks) as job:
        return job.finish(limit)


def start(road: str, folder: Path, shared: Path, *flags, ranks: int = 2) -> Job:
    return Job(road, *flags, "--output_dir", folder, "--cache_dir", shared / "cache", cwd=shared, ranks=ranks)


@pytest.fixture(scope="module")
def undisturbed(shared):
    """A function that gives the folder of a run that nobody disturbed, made at the first call."""

    def of(road: str, ranks: int = 2) -> Path:
        folder = shared / f"{road}-{ranks}"
        if not folder.exists():
            done = run(road, folder, shared, *FULL, ranks=ranks)
            assert done.status == 0, done.err
        return folder

    return of


def assert_same(a: Path, b: Path) -> None:
    for file in ("model/model.safetensors", "predictions.csv", "evaluations.jsonl"):
        assert (a / file).read_bytes() == (b / file).read_bytes(), file
    steps = [[{**step, "seconds": None} for step in read_steps(folder)] for folder in (a, b)]
    assert steps[0] == steps[1]
    assert [step["step"] for step in steps[0]] == list(range(1, STEPS + 1))
    scores = [json.loads((folder / "metrics.json").read_text()) for folder in (a, b)]
    assert scores[0]["loss"] == scores[1]["loss"]


def steps_in(folder: Path) -> int:
    return len((folder / "steps.jsonl").read_text().splitlines()) if (folder / "steps.jsonl").exists() else 0


# ---- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("road", "ranks", "step"), [("ddp_loop", 3, 10), ("trainer_run", 2, 15)])
def test_a_resumed_run_ends_as_one_that_never_stopped(undisturbed, shared, tmp_path, road, ranks, step):
    whole = undisturbed(road, ranks)
    source = whole / "checkpoints" / f"checkpoint-{step}"
    done = run(road, tmp_path / "on", shared, *FULL, "--resume_from_checkpoint", source, ranks=ranks)
    assert done.status == 0, done.err
    assert f"(step {step})" in done.out
    assert_same(whole, tmp_path / "on")


def test_behind_its_last_step_a_run_is_only_evaluated(shared, tmp_path):
    """At a learning rate that isn't zero in the end, where a step too many would show."""
    flags = [*SMALL, "--max_steps", 5, "--lr_scheduler_type", "constant", "--bf16", "--eval_strategy", "no"]
    for road in PATHS:
        folder = tmp_path / road
        assert run(road, folder, shared, *flags, ranks=1).status == 0
        for name in ("metrics.json", "predictions.csv"):
            (folder / name).rename(tmp_path / f"{road}-{name}")
        done = run(road, folder, shared, *flags, "--resume_from_checkpoint", "auto", ranks=1)
        assert done.status == 0, done.err
        assert len(read_steps(folder)) == 5
        for other in PATHS[: PATHS.index(road) + 1]:
            assert (folder / "predictions.csv").read_bytes() == (tmp_path / f"{other}-predictions.csv").read_bytes()


def test_a_folder_where_another_job_writes_is_left_alone(shared, tmp_path):
    with start("ddp_loop", tmp_path / "run", shared, *SMALL, "--max_steps", 2000) as job:
        job.wait_for(lambda: (tmp_path / "run" / "checkpoints" / "checkpoint-5" / "COMPLETE").exists())
        done = run(
            "ddp_loop", tmp_path / "run", shared, *SMALL, "--max_steps", 2000, "--resume_from_checkpoint", "auto"
        )
        assert job.torchrun.poll() is None
    assert len(done.error_lines) == 1, done.err
    assert "a run that has not ended is writing there" in done.error_lines[0]


def test_the_best_weights_are_the_same_on_both_roads_and_not_the_last(undisturbed):
    a, b = (undisturbed(road) for road in PATHS)
    assert_same(a, b)
    evaluations = [json.loads(line) for line in (a / "evaluations.jsonl").read_text().splitlines()]
    assert {line["rows"] for line in evaluations} == {"validation"}
    best = min(evaluations, key=lambda line: line["loss"])["step"]
    weights = (a / "checkpoints" / f"best-{best}" / "model.safetensors").read_bytes()
    from safetensors.torch import load, load_file

    model, kept = load_file(a / "model" / "model.safetensors"), load(weights)
    assert all(model[name].equal(kept[name]) for name in model)


def test_best_without_validation_rows_is_a_mistake(launch):
    done = launch("app.ddp_loop", "--csv", SAMPLE_CSV, "--load_best_model_at_end")
    assert done.status == 2
    assert len(done.error_lines) == 1
    assert "--validation_size" in done.error_lines[0]


@pytest.mark.parametrize("road", ["ddp_loop", pytest.param("trainer_run", marks=pytest.mark.slow)])
def test_at_another_number_of_ranks_the_same_batches_go_on(shared, tmp_path, road):
    flags = [*SMALL, "--dropout", 0, "--eval_strategy", "no"]
    assert run(road, tmp_path / "2", shared, *flags, ranks=2).status == 0
    for before, ranks, step in ((2, 3, 5), (3, 1, 10)):
        checkpoint, folder = tmp_path / str(before) / "checkpoints" / f"checkpoint-{step}", tmp_path / str(ranks)
        done = run(road, folder, shared, *flags, "--resume_from_checkpoint", checkpoint, ranks=ranks)
        assert done.status == 0, done.err
        assert "other dropout masks" in done.out
        for ours, theirs in zip(read_steps(folder), read_steps(tmp_path / "2"), strict=True):
            for name in ("step", "epoch", "examples", "tokens", "learning_rate"):
                assert ours[name] == theirs[name], "not the same global batch"
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)


def test_another_training_is_refused(undisturbed, shared, tmp_path):
    source = undisturbed("ddp_loop") / "checkpoints" / "checkpoint-10"
    resume = ["--resume_from_checkpoint", source]
    done = run("ddp_loop", tmp_path / "on", shared, *FULL, *resume, "--learning_rate", 3e-4, "--seed", 7)
    assert len(done.error_lines) == 1
    for part in ("learning_rate was 0.001 and is 0.0003", "seed was 42 and is 7", "split fingerprint was"):
        assert part in done.error_lines[0]
    assert not (tmp_path / "on").exists()


def test_two_damaged_checkpoints_are_passed_over_and_said(undisturbed, shared, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(undisturbed("ddp_loop"), folder)
    (folder / "metrics.json").unlink()
    latest_valid_checkpoint = folder / "checkpoints" / f"checkpoint-{STEPS}" / "optimizer.safetensors"
    content = bytearray(latest_valid_checkpoint.read_bytes())
    content[len(content) // 2] ^= 16
    latest_valid_checkpoint.write_bytes(content)
    cut = folder / "checkpoints" / "checkpoint-20" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    done = run("ddp_loop", folder, shared, *FULL, "--resume_from_checkpoint", "auto")
    assert done.status == 0, done.err
    told = [line for line in done.out.splitlines() if "is skipped" in line]
    assert [re.search(r"checkpoint-(\d+) is", line)[1] for line in told] == [str(STEPS), "20"]
    assert "(step 15)" in done.out
    assert_same(undisturbed("ddp_loop"), folder)


# ---- told to stop ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("road", "number", "to"),
    [
        ("ddp_loop", signal.SIGTERM, "rank 1"),
        ("trainer_run", signal.SIGUSR1, "rank 0"),
        ("ddp_loop", signal.SIGINT, "torchrun"),
        pytest.param("trainer_run", signal.SIGTERM, "all", marks=pytest.mark.slow),
        pytest.param("ddp_loop", signal.SIGUSR1, "torchrun", marks=pytest.mark.slow),
    ],
)
def test_told_to_stop_all_ranks_save_the_same_step_and_the_run_goes_on_from_there(
    undisturbed, shared, tmp_path, road, number, to
):
    whole, folder = undisturbed(road), tmp_path / "run"
    with start(road, folder, shared, *FULL) as job:
        job.wait_for(lambda: steps_in(folder) >= 5)
        ranks = [job.rank(rank) for rank in range(2)]
        if to.startswith("rank"):
            ranks[int(to[-1])].send_signal(number)
        else:
            job.torchrun.send_signal(number)
            for rank in ranks if to == "all" else ():  # as Slurm does
                rank.send_signal(number)
        told = time.monotonic()
        done = job.finish(20)
    assert time.monotonic() - told < 15
    stopped = [line for line in done.err.splitlines() if line.startswith("stopped: after step ")]
    assert len(stopped) == 1, done.err
    if to.startswith("rank"):
        assert "exitcode  : 75" in done.err
    step = int(stopped[0].split()[3])
    assert 5 < step < STEPS
    assert steps_in(folder) == step
    done = run(road, folder, shared, *FULL, "--resume_from_checkpoint", "auto")
    assert done.status == 0, done.err
    assert f"(step {step})" in done.out
    assert_same(whole, folder)


LATE = """
import os, signal
from app import ddp_loop
from app.cli import launch

evaluate = ddp_loop.evaluate

def evaluate_late(*arguments):
    os.kill(os.getpid(), signal.SIGUSR1)
    return evaluate(*arguments)

ddp_loop.evaluate = evaluate_late
launch(ddp_loop.main, None)
"""


def test_a_signal_in_the_last_evaluation_lets_it_finish(launch, review_csv, tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    flags = ["--csv", review_csv(), "--train_batch_size", 8, "--max_steps", 1, "--eval_strategy", "no"]
    done = launch(str(tmp_path / "late.py"), *flags, "--output_dir", "run")
    assert done.status == 0, done.err
    assert (tmp_path / "run" / "metrics.json").is_file()


def test_a_second_signal_ends_a_rank_at_once_even_where_it_waits_for_another(shared, tmp_path):
    with start("ddp_loop", tmp_path / "run", shared, *SMALL, "--max_steps", 2000) as job:
        job.wait_for(lambda: steps_in(tmp_path / "run") >= 5)
        waiting, frozen = job.rank(0), job.rank(1)
        frozen.suspend()
        time.sleep(1)
        waiting.terminate()
        time.sleep(1.5)
        assert waiting.is_running()
        waiting.terminate()
        waiting.wait(1)
        frozen.kill()
        done = job.finish(30)
    assert "exitcode  : 143" in done.err


# ---- failing well ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("road", "then"), [("ddp_loop", "continue"), ("trainer_run", "continue"), ("ddp_loop", "stop")]
)
def test_a_full_disk_during_a_save(undisturbed, shared, mount, road, then):
    first = undisturbed(road) / "checkpoints" / "checkpoint-5"
    one = sum(path.stat().st_size for path in first.iterdir())
    folder = mount(f"size={int(one * 1.6)}") / "run"  # holds one and the model, not two
    done = run(road, folder, shared, *SMALL, "--eval_strategy", "no", "--on_save_failure", then)
    whole = sorted(path.parent.name for path in folder.glob("checkpoints/*/COMPLETE"))
    assert whole == ["checkpoint-5"]
    assert [path.name for path in (folder / "checkpoints").iterdir()] in (
        ["checkpoint-5"],
        [".writing", "checkpoint-5"],
    )
    if then == "continue":
        assert done.status == 0, done.err
        assert (folder / "model" / "model.safetensors").is_file()
        told = [line for line in done.out.splitlines() if line.startswith("warning: ")]
        assert len(told) == 4, "one line a failed save"
    else:
        told = done.error_lines
        assert len(told) == 1, done.err
    for line in told:
        assert "No space left" in line or re.search(r"\d+ MiB are free there", line)
        assert "checkpoint-5" in line


def test_a_loss_that_is_not_finite_stops_the_run_before_the_optimizer_s_step(shared, tmp_path):
    lines = []
    for road in PATHS:
        folder = tmp_path / road
        flags = ["--learning_rate", 1e30, "--warmup_steps", 0, "--max_grad_norm", 0, "--eval_strategy", "no"]
        done = run(road, folder, shared, *SMALL, *flags)
        assert done.status == 1
        assert len(done.error_lines) == 1, done.err
        line = done.error_lines[0]
        step = int(re.search(r"step (\d+): ", line)[1])
        assert "the optimizer skipped this step" in line
        assert steps_in(folder) == step - 1
        for rank in range(2):
            rows = re.search(rf"rank {rank}, rows ([\d, ]+)", line)[1]
            assert len({int(row) for row in rows.split(",")}) == 6
        lines.append(line)
    assert lines[0] == lines[1]


@pytest.mark.slow  # torchrun gives it 30 s before it kills it
def test_a_frozen_rank_is_named_and_no_process_stays(shared, tmp_path):
    with start("ddp_loop", tmp_path / "run", shared, *SMALL, "--max_steps", 2000, "--ddp_timeout", 8, ranks=3) as job:
        job.wait_for(lambda: steps_in(tmp_path / "run") >= 5)
        job.rank(1).suspend()
        done = job.finish(80)
    assert done.status == 1
    assert len(done.error_lines) == 1, done.err
    assert "rank 0 lost contact with rank(s) 1, after step" in done.error_lines[0]


def test_a_folder_that_vanishes_ends_the_run_with_one_line(shared, tmp_path):
    folder = tmp_path / "run"
    with start("trainer_run", folder, shared, *SMALL, "--max_steps", 2000) as job:
        job.wait_for(lambda: steps_in(folder) >= 5)
        folder.rename(tmp_path / "elsewhere")
        done = job.finish(60)
    assert done.status == 1
    assert len(done.error_lines) == 1, done.err
    assert "No such file or directory" in done.error_lines[0]
    assert not folder.exists()


def test_a_folder_that_can_only_be_read_is_one_line(shared, mount):
    done = run("ddp_loop", mount("ro") / "run", shared, *SMALL)
    assert len(done.error_lines) == 1, done.err
    assert "can't be written: Read-only file system" in done.error_lines[0]


# ---- killed ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_ranks_come_back_and_nothing_is_lost(shared):
    """The torture script, for a few kills."""
    command = [
        sys.executable,
        "-m",
        "app.experiments.fault_injection",
        "--kills",
        "3",
        "--seed",
        "5",
        "--csv",
        str(SAMPLE_CSV),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("3 kills in ")


def test_the_sample_has_enough_rows_for_an_epoch_that_is_cut_in_the_middle():
    assert len(pd.read_csv(SAMPLE_CSV)) * 0.8 > 12 * STEPS
