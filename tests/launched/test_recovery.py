"""Runs that fail in this process, before or while they write: nothing is lost, and the error is one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.jobs import write_reviews
from safetensors.torch import load_file

import app.ddp_loop
import app.strategies.ddp
import app.trainer.review_trainer
import app.trainer_run
import app.training.prepare
from app.cli import parse_settings
from app.common.errors import AgreedError
from app.runs.folder import lock
from app.runs.schema import LOCK

FLAGS = ["--train_batch_size=8", "--max_steps=8", "--validation_size=0.1", "--eval_strategy=steps", "--eval_steps=4"]
FLAGS += ["--save_strategy=steps", "--save_steps=4", "--save_total_limit=9", "--load_best_model_at_end"]
FLAGS += ["--metric_for_best_model=loss", "--logging_steps=1", "--disable_tqdm", "--use_cpu", "--threads=1"]


@pytest.fixture(scope="module", params=[app.ddp_loop, app.trainer_run], ids=["ddp_loop", "trainer_run"])
def path(request) -> ModuleType:
    return request.param


@pytest.fixture(scope="module")
def fine_tune(path, world, tmp_path_factory) -> Callable[..., Path]:
    """Train with a path in this process. The first argument is the run's folder."""
    data = tmp_path_factory.mktemp("data")
    write_reviews(data / "reviews.csv", 100)
    places = [f"--csv={data / 'reviews.csv'}", f"--cache_dir={data / 'cache'}"]

    def run(folder: Path, *flags: str) -> Path:
        path.fine_tune(parse_settings([*FLAGS, *places, f"--output_dir={folder}", *flags]), world)
        return folder

    return run


@pytest.fixture(scope="module")
def finished(fine_tune, tmp_path_factory) -> Path:
    return fine_tune(tmp_path_factory.mktemp("finished") / "run")


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("out of memory")


def content_of(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != "settings.json")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.mark.parametrize("place", ["another learning rate", "the first step", "the test evaluation"])
def test_a_resumed_run_that_fails_before_its_first_step_is_done_loses_nothing(
    path, fine_tune, finished, tmp_path, monkeypatch, place
):
    killed, copy = tmp_path / "killed", tmp_path / "copy"
    shutil.copytree(finished, killed)
    (killed / "metrics.json").unlink()
    with monkeypatch.context() as broken:
        if place == "the first step":  # of those after checkpoint-4, because the latest one is damaged
            damaged = killed / "checkpoints" / "checkpoint-8" / "state-0-of-1.safetensors"
            damaged.write_bytes(damaged.read_bytes()[:-1])
            broken.setattr(app.strategies.ddp.DDPStrategy, "clip_grad_norm", fail)
        else:
            broken.setattr(app.trainer.review_trainer if path is app.trainer_run else path, "score", fail)
        before = content_of(killed)
        flags, message = (["--learning_rate=1"], "learning_rate") if "rate" in place else ([], "out of memory")
        with pytest.raises((RuntimeError, AgreedError), match=message):
            fine_tune(killed, "--resume_from_checkpoint=auto", *flags)
    assert content_of(killed) == before

    shutil.copytree(killed, copy)  # the process that has failed still locks the run
    fine_tune(copy, "--resume_from_checkpoint=auto")
    resumed, expected = content_of(copy), content_of(finished)
    assert resumed.keys() == expected.keys()
    for name in ("predictions.csv", "evaluations.jsonl", "model/model.safetensors"):
        assert resumed[name] == expected[name], name


def test_the_model_of_a_run_has_its_best_weights(fine_tune, tmp_path):
    # A large learning rate: the last weights are not the best ones.
    run = fine_tune(tmp_path / "run", "--learning_rate=0.3", "--warmup_steps=0", "--eval_steps=1")
    evaluations = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert {line["rows"] for line in evaluations} == {"validation"}
    best = min(evaluations, key=lambda line: line["loss"])["step"]
    assert best < 8
    kept = load_file(run / f"checkpoints/best-{best}/state-0-of-1.safetensors")
    model = load_file(run / "model" / "model.safetensors")
    same_shape = [n for n in model if f"model.{n}" in kept and model[n].shape == kept[f"model.{n}"].shape]
    assert len(same_shape) > 10, "all but the embeddings, whose unused rows are apart"
    assert all(model[name].equal(kept[f"model.{name}"]) for name in same_shape)


def test_a_checkpoint_that_its_own_run_removes_meanwhile_is_a_one_line_error(
    path, fine_tune, finished, tmp_path, monkeypatch
):
    checkpoint = shutil.copytree(finished, tmp_path / "run") / "checkpoints" / "checkpoint-4"
    prepare = path.prepare

    def prepare_late(*arguments: Any, **names: Any) -> Any:
        prepared = prepare(*arguments, **names)
        shutil.rmtree(checkpoint)
        return prepared

    monkeypatch.setattr(path, "prepare", prepare_late)
    with pytest.raises(AgreedError, match="checkpoint-4: has been removed since this run was started"):
        fine_tune(tmp_path / "new", f"--resume_from_checkpoint={checkpoint}")


def test_a_folder_to_which_another_job_has_written_meanwhile_is_refused(fine_tune, finished, tmp_path, monkeypatch):
    """The job has found that the folder does not exist, and gets its lock only after the other one has ended."""
    late = tmp_path / "late"

    def lock_late(folder: Path) -> int:
        shutil.copytree(finished, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(LOCK))
        return lock(folder)

    monkeypatch.setattr(app.training.prepare, "lock", lock_late)
    with pytest.raises(AgreedError, match=r"^--output_dir .*late: exists and is not an empty folder"):
        fine_tune(late)
    assert content_of(late) == content_of(finished)
