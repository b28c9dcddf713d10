"""Runs that cannot be resumed, fail, freeze or are killed, or that run out of disk space: nothing is lost.

Runs that only train and resume share torchrun jobs; whatever tests a signal, an exit status or a process is a job of
its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from helpers.jobs import SAMPLE_CSV, Job, Outcome, TrainingRun, read_steps, require_success, run_many
from safetensors.torch import load_file

import app.checkpoint.state
import app.ddp_loop
import app.strategies.ddp
import app.trainer.review_trainer
import app.trainer_run
from app.cli import parse_settings
from app.common.errors import AgreedError, RunError, UserError
from app.distributed.world import World
from app.training.prepare import Preparation, prepare

PATHS = ("ddp_loop", "trainer_run")
STEPS = 24
SMALL = [
    *("--csv", SAMPLE_CSV, "--max_length", 48, "--train_batch_size", 12, "--max_steps", STEPS, "--use_cpu"),
    *("--save_strategy", "steps", "--save_steps", 5, "--save_total_limit", 9, "--disable_tqdm", "--threads", 1),
]
FULL = [  # checkpoints in the middle of an epoch and between two evaluations, with dropout
    *SMALL,
    *("--gradient_accumulation_steps", 2, "--validation_size", 0.1, "--load_best_model_at_end"),
    *("--eval_strategy", "steps", "--eval_steps", 6, "--metric_for_best_model", "loss"),
]
ENDLESS = [*SMALL, "--max_steps", 5000, "--eval_strategy", "no"]
NOT_FINITE = [*SMALL, "--learning_rate", 1e30, "--warmup_steps", 0, "--max_grad_norm", 0, "--eval_strategy", "no"]


def resume(*flags, source: str | Path) -> list:
    return [*flags, "--resume_from_checkpoint", source]


def write_inputs(folder: Path, csv: Path) -> None:
    """The runs read the bundled sample."""


SOURCE = "ddp_loop-2/checkpoints/checkpoint-10"
SHARED_RUNS = {
    "two_ranks": {
        **{f"{path}-2": TrainingRun(path, FULL) for path in PATHS},
        "refused": TrainingRun("ddp_loop", resume(*FULL, "--learning_rate", 3e-4, "--seed", 7, source=SOURCE)),
        **{f"not-finite-{path}": TrainingRun(path, NOT_FINITE) for path in PATHS},
    },
}
SLOW_SHARED_RUNS = {
    "three_ranks": {
        "ddp_loop-3": TrainingRun("ddp_loop", FULL),
        "zero3-3": TrainingRun("trainer_run", [*FULL, "--strategy", "zero3"]),
        # of a run of two ranks
        "refused-3": TrainingRun("trainer_run", resume(*FULL, source="trainer_run-2/checkpoints/checkpoint-10")),
    }
}


@pytest.fixture(scope="module")
def shared(outcomes, shared_folder) -> Path:
    """The folder of all runs that share jobs, and of the token cache."""
    return shared_folder


@pytest.fixture(scope="module")
def outcomes(trained_by) -> dict[str, Outcome]:
    """The outcomes of runs of two ranks."""
    return trained_by("two_ranks")


@pytest.fixture(scope="module")
def two_ranks(outcomes, shared_folder) -> Path:
    """The folder of the uninterrupted runs PATH-2."""
    require_success({f"{path}-2": outcomes[f"{path}-2"] for path in PATHS})
    return shared_folder


@pytest.fixture(scope="module")
def three_ranks(trained_by) -> dict[str, Outcome]:
    return trained_by("three_ranks")


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


def start(path_name: str, folder: Path, shared: Path, *flags, ranks: int = 2) -> Job:
    return Job(path_name, *flags, "--output_dir", folder, "--cache_dir", shared / "cache", cwd=shared, ranks=ranks)


# ---- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.launched
def test_the_best_weights_are_the_same_in_both_paths_and_not_the_last(two_ranks):
    a, b = (two_ranks / f"{path}-2" for path in PATHS)
    assert_same(a, b)
    evaluations = [json.loads(line) for line in (a / "evaluations.jsonl").read_text().splitlines()]
    assert {line["rows"] for line in evaluations} == {"validation"}
    best = min(evaluations, key=lambda line: line["loss"])["step"]
    model = load_file(a / "model/model.safetensors")
    kept = load_file(a / f"checkpoints/best-{best}/state-0-of-2.safetensors")
    same_shape = [
        name for name in model if f"model.{name}" in kept and model[name].shape == kept[f"model.{name}"].shape
    ]
    assert len(same_shape) > 10, "all but the embeddings, whose unused rows are apart"
    assert all(model[name].equal(kept[f"model.{name}"]) for name in same_shape)


def test_best_weights_without_validation_rows_are_a_mistake():
    with pytest.raises(UserError, match="--validation_size"):
        parse_settings(arguments=["--load_best_model_at_end"])


@pytest.mark.launched
@pytest.mark.slow
def test_shards_that_do_not_fill_vector_registers_train_to_the_same_bits(three_ranks, shared):
    """A third of 128 elements is 43: the last ones of each shard are updated by other instructions."""
    assert three_ranks["zero3-3"].problem is None
    assert_same(shared / "ddp_loop-3", shared / "zero3-3")


@pytest.mark.launched
@pytest.mark.slow
def test_a_number_of_ranks_that_does_not_divide_the_logical_ranks_is_refused(three_ranks, shared):
    problem = three_ranks["refused-3"].problem
    assert re.search("AgreedError: --logical_ranks 2 .*cannot be divided among 3 rank.*: start 1 or 2 rank", problem)
    assert not (shared / "refused-3").exists()


@pytest.mark.launched
def test_another_training_is_refused(outcomes, shared):
    problem = outcomes["refused"].problem
    assert problem.startswith("AgreedError: ")
    for part in ("learning_rate was 0.001 and is 0.0003", "seed was 42 and is 7", "split fingerprint was"):
        assert part in problem
    assert not (shared / "refused").exists()


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("path_name", PATHS)
@pytest.mark.parametrize("place", ["the first step", "the test evaluation"])
def test_a_resumed_run_that_fails_before_its_first_step_is_done_loses_nothing(
    world, review_csv, tmp_path, path_name, place
):
    path = {"ddp_loop": app.ddp_loop, "trainer_run": app.trainer_run}[path_name]
    flags = ["--csv", review_csv(100), "--train_batch_size", 8, "--max_steps", 8, "--validation_size", 0.1]
    flags += ["--eval_strategy", "steps", "--eval_steps", 4, "--save_strategy", "steps", "--save_steps", 4]
    flags += ["--load_best_model_at_end", "--save_total_limit", 9, "--logging_steps", 1, "--disable_tqdm", "--use_cpu"]
    flags += ["--cache_dir", tmp_path / "cache"]
    run, killed = tmp_path / "run", tmp_path / "killed"
    path.fine_tune(parse_settings(arguments=[*map(str, flags), "--output_dir", str(run)]), world)
    shutil.copytree(run, killed)
    (killed / "metrics.json").unlink()
    broken = patch.object({app.trainer_run: app.trainer.review_trainer}.get(path, path), "score", fail)
    if place == "the first step":
        shutil.rmtree(killed / "checkpoints" / "checkpoint-8")
        broken = patch.object(app.strategies.ddp.DDPStrategy, "clip_grad_norm", fail)
    files = [file for file in killed.rglob("*") if file.is_file() and file.name != "settings.json"]
    before = {file: file.read_bytes() for file in files}

    arguments = list(map(str, resume(*flags, source=killed)))
    # A rank that fails keeps its signal handlers, because its process ends next.
    with broken, patch.object(path, "StopRequest", NeverStopped), pytest.raises(RuntimeError, match="out of memory"):
        path.fine_tune(parse_settings(arguments=arguments), world)
    assert {file: file.read_bytes() for file in files} == before

    shutil.copytree(killed, tmp_path / "copy")  # the process that has failed still locks the run
    arguments[-1] = str(tmp_path / "copy")
    path.fine_tune(parse_settings(arguments=arguments), world)
    names = {file.relative_to(run) for file in run.rglob("*") if file.is_file()}
    assert {file.relative_to(tmp_path / "copy") for file in (tmp_path / "copy").rglob("*") if file.is_file()} == names
    for name in ("predictions.csv", "evaluations.jsonl", "model/model.safetensors"):
        assert (tmp_path / "copy" / name).read_bytes() == (run / name).read_bytes(), name


@pytest.mark.parametrize("path_name", PATHS)
def test_a_checkpoint_that_its_own_run_removes_meanwhile_is_a_one_line_error(world, review_csv, tmp_path, path_name):
    path = {"ddp_loop": app.ddp_loop, "trainer_run": app.trainer_run}[path_name]
    flags = ["--csv", review_csv(100), "--train_batch_size", 8, "--max_steps", 2, "--eval_strategy", "no", "--use_cpu"]
    flags += ["--save_strategy", "steps", "--save_steps", 1, "--disable_tqdm", "--cache_dir", tmp_path / "cache"]
    path.fine_tune(parse_settings(arguments=[*map(str, flags), "--output_dir", str(tmp_path / "run")]), world)
    checkpoint = tmp_path / "run" / "checkpoints" / "checkpoint-1"

    def prepare_late(*arguments: Any, **names: Any) -> Preparation:
        prepared = prepare(*arguments, **names)
        shutil.rmtree(checkpoint)
        return prepared

    settings = parse_settings(
        arguments=list(map(str, [*resume(*flags, source=checkpoint), "--output_dir", tmp_path / "new"]))
    )
    removed = pytest.raises(AgreedError, match="checkpoint-1: has been removed since this run was started")
    with patch.object(path, "prepare", prepare_late), patch.object(path, "StopRequest", NeverStopped), removed:
        path.fine_tune(settings, world)


class NeverStopped:
    """Stands in for `StopRequest`."""

    def __init__(self, world: World) -> None:
        pass

    def __enter__(self) -> NeverStopped:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def requested(self) -> bool:
        return False


@pytest.mark.launched
@pytest.mark.slow
def test_a_folder_in_which_another_job_writes_is_left_alone(world, shared, tmp_path):
    folder = tmp_path / "run"
    with start("ddp_loop", folder, shared, *ENDLESS, ranks=1) as job:
        job.wait_for((folder / "checkpoints" / "checkpoint-5" / "run_state.json").exists)
        flags = [*ENDLESS, "--output_dir", folder, "--cache_dir", shared / "cache", "--resume_from_checkpoint", "auto"]
        with pytest.raises(AgreedError, match="a run that has not ended is writing to it"):
            app.ddp_loop.fine_tune(parse_settings(arguments=list(map(str, flags))), world)
        assert job.torchrun.poll() is None


def test_a_signal_in_the_last_evaluation_lets_the_run_finish(world, review_csv, tmp_path):
    def evaluate_late(*arguments, **names):
        os.kill(os.getpid(), signal.SIGUSR1)
        return evaluate(*arguments, **names)

    evaluate = app.ddp_loop.evaluate
    flags = ["--csv", review_csv(), "--train_batch_size", 8, "--max_steps", 1, "--eval_strategy", "no"]
    flags += ["--output_dir", tmp_path / "run", "--cache_dir", tmp_path / "cache"]
    with patch.object(app.ddp_loop, "evaluate", evaluate_late):
        app.ddp_loop.fine_tune(parse_settings(arguments=list(map(str, flags))), world)
    assert (tmp_path / "run" / "metrics.json").is_file()


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.launched
@pytest.mark.slow
def test_a_disk_that_fills_up_during_a_save(two_ranks, mount):
    first = two_ranks / "ddp_loop-2" / "checkpoints" / "checkpoint-5"
    size = sum(path.stat().st_size for path in first.iterdir())
    cases = [("ddp_loop", "continue"), ("trainer_run", "continue"), ("ddp_loop", "stop")]
    folders = {case: mount(f"size={int(size * 1.6)}") / "run" for case in cases}  # enough for one and the model
    runs = {
        "-".join(case): TrainingRun(
            case[0],
            [*SMALL, "--eval_strategy", "no", "--on_save_failure", case[1], "--output_dir", folders[case]],
        )
        for case in cases
    }
    outcomes = run_many(two_ranks, runs)
    for case, folder in folders.items():
        complete = sorted(path.parent.name for path in folder.glob("checkpoints/*/run_state.json"))
        assert complete == ["checkpoint-5"]
        names = {path.name for path in (folder / "checkpoints").iterdir()}
        assert names == {"checkpoint-5"}
        outcome = outcomes["-".join(case)]
        if case[1] == "continue":
            assert outcome.problem is None
            assert (folder / "model" / "model.safetensors").is_file()
            lines = [line for line in outcome.out.splitlines() if line.startswith("warning: ")]
            assert len(lines) == 4, "one line per failed save"
        else:
            assert outcome.problem.startswith("RunError: ")
            lines = [outcome.problem]
        for line in lines:
            assert "No space left" in line or re.search(r"\d+ MiB are free there", line)
            assert "checkpoint-5" in line


@pytest.mark.launched
def test_a_nonfinite_loss_stops_the_run_before_the_optimizer_step(outcomes, shared):
    problems = [outcomes[f"not-finite-{path}"].problem for path in PATHS]
    for problem, path in zip(problems, PATHS, strict=True):
        assert problem.startswith("RunError: ")
        step = int(re.search(r"step (\d+): ", problem)[1])
        assert steps_in(shared / f"not-finite-{path}") == step - 1
        for rank in range(2):
            rows = re.search(rf"rank {rank}, rows ([\d, ]+)", problem)[1]
            assert len({int(row) for row in rows.split(",")}) == 6
    assert problems[0] == problems[1]


@pytest.mark.parametrize("path_name", PATHS)
def test_a_folder_that_is_moved_during_a_checkpoint_is_not_created_again(
    world, review_csv, tmp_path, monkeypatch, path_name
):
    path = {"ddp_loop": app.ddp_loop, "trainer_run": app.trainer_run}[path_name]
    run, write = tmp_path / "run", app.checkpoint.state.save_file

    def move_first(*arguments: Any, **named: Any) -> Any:
        if run.exists():
            run.rename(tmp_path / "moved")
        return write(*arguments, **named)

    flags = ["--csv", review_csv(100), "--train_batch_size", 8, "--max_steps", 3, "--eval_strategy", "no", "--use_cpu"]
    flags += ["--save_strategy", "steps", "--save_steps", 2, "--disable_tqdm"]
    flags += ["--cache_dir", tmp_path / "cache", "--output_dir", run]
    monkeypatch.setattr(app.checkpoint.state, "save_file", move_first)
    moved = pytest.raises((OSError, AgreedError, RunError), match=re.escape(str(run)))
    with patch.object(path, "StopRequest", NeverStopped), moved:
        path.fine_tune(parse_settings(arguments=list(map(str, flags))), world)
    assert (tmp_path / "moved").is_dir(), "the fault has not occurred"
    assert not run.exists()


def test_a_read_only_folder_is_one_line(world, mount, tmp_path):
    flags = [*SMALL, "--output_dir", mount("ro") / "run", "--cache_dir", tmp_path / "cache"]
    with pytest.raises(AgreedError, match="cannot be written: Read-only file system"):
        app.ddp_loop.fine_tune(parse_settings(arguments=list(map(str, flags))), world)


# ---- killed ----------------------------------------------------------------------------------------------------------


@pytest.mark.launched
@pytest.mark.slow
def test_killed_ranks_resume_and_nothing_is_lost(launch):
    """The fault injection experiment, with a few kills."""
    flags = ["--kills", 2, "--seed", 5, "--csv", SAMPLE_CSV]
    done = launch("app.experiments.faults", *flags, limit=700)
    assert done.status == 0, done.out + done.err
    assert done.out.splitlines()[-1].startswith("2 kills in ")
