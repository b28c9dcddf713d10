"""Which checkpoint a run goes on from, and what it refuses to go on from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from app import run_record
from app.distributed.checkpoints import seal
from app.errors import Preempted, RunError, UserError
from app.files import lock
from app.resume import STATE, Resume, _find, check_fits
from app.settings import Settings

STEP, TOTAL, FINGERPRINT = 4, 9, "f" * 64


def silent(text: str) -> None:
    pass


@pytest.fixture
def folder(tmp_path) -> Path:
    """A run that was killed behind its checkpoint-4, in the middle of writing step 6."""
    return make_run(tmp_path / "run")


def make_run(folder: Path, **settings) -> Path:
    mine = Settings(learning_rate=1e-3, **settings).as_dict()
    state = {"path": "ddp_loop", "step": STEP, "total_steps": TOTAL, "fingerprint": FINGERPRINT, "world_size": 1}
    for name, files in (("checkpoint-4", {STATE: state | {"settings": mine, "best": {"step": 2}}}), ("best-2", {})):
        aside = folder / "checkpoints" / ".writing" / name
        aside.mkdir(parents=True)
        for file, content in (files | {"weights": 1}).items():
            (aside / file).write_text(json.dumps(content))
        seal(aside, folder / "checkpoints" / name)
    (folder / "settings.json").write_text("{}")
    (folder / "steps.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 6)) + '{"step": 6, "lo')
    (folder / "evaluations.jsonl").write_text('{"step": 2}\n{"step": 5}\n')
    return folder


def resume(folder: Path) -> Resume:
    checkpoint = folder / "checkpoints" / "checkpoint-4"
    return Resume(folder, checkpoint, json.loads((checkpoint / STATE).read_text()))


def check(folder: Path, **settings) -> None:
    check_fits(resume(folder), "ddp_loop", Settings(learning_rate=1e-3, **settings), FINGERPRINT, TOTAL)


def test_the_lines_behind_the_checkpoint_are_dropped(folder):
    assert resume(folder).lines_of("steps.jsonl") == [f'{{"step": {step}}}\n' for step in range(1, 5)]
    assert resume(folder).lines_of("evaluations.jsonl") == ['{"step": 2}\n']
    check(folder)


@pytest.mark.parametrize(
    ("log", "change", "told"),
    [
        ("steps.jsonl", lambda text: text.replace('"step": 2', '"step: 2'), r"steps\.jsonl, line 2: damaged"),
        ("steps.jsonl", lambda text: text.replace('{"step": 2}', "[]"), r"steps\.jsonl, line 2: damaged"),
        ("steps.jsonl", lambda text: text.replace('{"step": 2}', '{"step": "x"}'), r"steps\.jsonl, line 2: damaged"),
        ("steps.jsonl", lambda text: text.replace('{"step": 2}\n', ""), r"steps\.jsonl: lacks steps"),
        ("steps.jsonl", lambda text: "", r"steps\.jsonl: lacks steps"),
        ("evaluations.jsonl", lambda text: "\0" + text, r"evaluations\.jsonl, line 1: damaged"),
    ],
)
def test_a_log_that_can_t_be_gone_on_with_is_named(folder, log, change, told):
    file = folder / log
    file.write_text(change(file.read_text()))
    with pytest.raises(UserError, match=told):
        check(folder)


def test_a_missing_log_is_named(folder):
    (folder / "steps.jsonl").unlink()
    with pytest.raises(UserError, match=r"steps\.jsonl: lacks steps"):
        check(folder)


CHOOSING = {"load_best_model_at_end": True, "validation_size": 0.1, "metric_for_best_model": "loss"}


@pytest.mark.parametrize(
    "change", [{"metric_for_best_model": "f1"}, {"load_best_model_at_end": False}, {"eval_batch_size": 7}]
)
def test_what_is_best_may_not_change_on_the_way(tmp_path, change):
    run = make_run(tmp_path / "choosing", **CHOOSING)
    check(run, **CHOOSING)
    with pytest.raises(UserError, match=f"{next(iter(change))} was "):
        check(run, **CHOOSING | change)


def test_a_model_of_another_commit_is_refused_and_the_right_one_named(folder):
    found = resume(folder)
    found.state["model_commit"] = "a" * 40

    def check_commit(commit: str) -> None:
        check_fits(found, "ddp_loop", Settings(learning_rate=1e-3, revision="any"), FINGERPRINT, TOTAL, commit)

    check_commit("a" * 40)
    with pytest.raises(UserError, match=f"add --revision {'a' * 40}"):
        check_commit("b" * 40)


def test_the_best_weights_so_far_must_be_there_before_the_training_goes_on(tmp_path):
    run = make_run(tmp_path / "choosing", **CHOOSING)
    (run / "checkpoints" / "best-2" / "weights").write_text("2")
    with pytest.raises(UserError, match="best-2, the best weights before it: weights is not what was written"):
        check(run, **CHOOSING)


def test_auto_goes_on_in_the_folder_asked_for_or_begins_there(folder, tmp_path):
    settings = Settings(output_dir=str(folder), resume_from_checkpoint="auto")
    assert _find("ddp_loop", settings, None, silent) == (folder, folder / "checkpoints" / "checkpoint-4")
    settings = Settings(output_dir=str(tmp_path / "new"), resume_from_checkpoint="auto")
    assert _find("ddp_loop", settings, None, silent) == (None, None)


def test_auto_never_begins_anew_over_a_finished_run(folder):
    (folder / "metrics.json").write_text("{}")
    (folder / "checkpoints" / "checkpoint-4" / "COMPLETE").unlink()
    settings = Settings(output_dir=str(folder), resume_from_checkpoint="auto")
    with pytest.raises(UserError, match="holds a finished run"):
        _find("ddp_loop", settings, None, silent)


def test_a_checkpoint_outside_a_run_s_folder_is_refused(folder, tmp_path):
    (tmp_path / "precious").mkdir()
    alone = (folder / "checkpoints" / "checkpoint-4").rename(tmp_path / "precious" / "checkpoint-4")
    with pytest.raises(UserError, match="lies in no run's folder"):
        _find("ddp_loop", Settings(resume_from_checkpoint=str(alone)), None, silent)


def test_processes_that_torchrun_starts_anew_go_on_from_what_was_asked_for_until_they_have_their_own(folder, tmp_path):
    asked = folder / "checkpoints" / "checkpoint-4"
    settings = Settings(output_dir=str(tmp_path / "new"), resume_from_checkpoint=str(asked))
    own = tmp_path / "new"
    assert _find("ddp_loop", settings, str(own), silent) == (own, asked)
    make_run(own)
    assert _find("ddp_loop", settings, str(own), silent) == (own, own / "checkpoints" / "checkpoint-4")


def test_a_folder_is_one_job_s_until_that_has_ended(tmp_path):
    held = lock(tmp_path)
    with pytest.raises(UserError, match="has not ended"):
        lock(tmp_path)
    os.close(held)
    os.close(lock(tmp_path))


def test_a_stop_without_its_checkpoint_is_a_failure(monkeypatch, tmp_path):
    record = SimpleNamespace(folder=tmp_path)
    for saved, outcome in ((6, Preempted), (5, RunError), (None, RunError)):
        checkpoint = tmp_path / f"checkpoint-{saved}" if saved else None
        monkeypatch.setattr(run_record, "progress", SimpleNamespace(step=6, checkpoint=checkpoint))
        assert type(run_record.RunRecord.preempted(record, 6, 60)) is outcome
