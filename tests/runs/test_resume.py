"""Which checkpoint a run goes on from, and what it refuses to go on from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.checkpoint.manager import commit_checkpoint
from app.errors import Preempted, RunError, UserError
from app.runs import resume as resume_module
from app.runs.folder import lock
from app.runs.record import RunRecord
from app.runs.resume import STATE, Resume, _read_state, check_fits, find, folder_of_this_job
from app.settings import Settings

STEP, TOTAL, FINGERPRINT = 4, 9, "f" * 64
RECORDED = {"path": "ddp_loop", "world_size": 1, "csv": "reviews.csv", "train_batch_size": 8}


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
        commit_checkpoint(aside, folder / "checkpoints" / name)
    (folder / "settings.json").write_text(json.dumps(RECORDED))
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
    (folder / "evaluations.jsonl").write_text('{"step": 2}\n{"step": 4}\n{"step": 5}\n')
    assert resume(folder).lines_of("evaluations.jsonl") == ['{"step": 2}\n', '{"step": 4}\n']
    assert resume(folder).lines_of("evaluations.jsonl", before=4) == ['{"step": 2}\n']  # it is evaluated again
    check(folder)


def test_a_resumed_run_is_as_deterministic_as_before(folder):
    with pytest.raises(UserError, match="deterministic was False and is True"):
        check(folder, deterministic=True)


def test_a_checkpoint_from_before_a_setting_existed_had_its_default(folder):
    mine = resume(folder)
    del mine.state["settings"]["deterministic"]
    settings = Settings(learning_rate=1e-3)
    check_fits(mine, "ddp_loop", settings, FINGERPRINT, TOTAL)
    settings.deterministic = True
    with pytest.raises(UserError, match="deterministic was False and is True"):
        check_fits(mine, "ddp_loop", settings, FINGERPRINT, TOTAL)


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


@pytest.fixture
def search():
    """Calls `find` and releases the lock that it took, as the end of the process would."""
    locks = []

    def call(settings: Settings, own: Path | None = None):
        found = find("ddp_loop", settings, own, silent)
        locks.append(found.lock)
        if found.lock is not None:
            with pytest.raises(UserError, match="has not ended"):
                lock(found.folder)
            os.close(found.lock)
        return found.folder, found.checkpoint, found.finished

    return call


def test_auto_resumes_in_the_requested_folder_or_starts_there(folder, tmp_path, search):
    settings = Settings(output_dir=str(folder), resume_from_checkpoint="auto")
    assert search(settings) == (folder, folder / "checkpoints" / "checkpoint-4", False)
    settings = Settings(output_dir=str(tmp_path / "new"), resume_from_checkpoint="auto")
    assert search(settings) == (None, None, False)


def test_auto_leaves_the_folder_of_another_program_alone(tmp_path, search):
    (tmp_path / "settings.json").write_text('{"path": "/usr/bin", "editor.fontSize": 12}')
    assert search(Settings(output_dir=str(tmp_path), resume_from_checkpoint="auto")) == (None, None, False)
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


def test_auto_refuses_the_folder_of_the_other_training_path(folder, search):
    with pytest.raises(UserError, match="holds a run of ddp_loop: name another folder"):
        find("trainer_run", Settings(output_dir=str(folder), resume_from_checkpoint="auto"), None, silent)


def test_a_run_folder_may_be_named_like_a_checkpoint(folder, search):
    renamed = folder.rename(folder.with_name("checkpoint-old"))
    checkpoint = renamed / "checkpoints" / "checkpoint-4"
    assert search(Settings(resume_from_checkpoint=str(renamed))) == (renamed, checkpoint, False)


@pytest.mark.parametrize("is_restart", [False, True])
def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_again_over_them(folder, is_restart):
    """The cause may pass, such as a disk that can't be read for a moment."""
    weights = folder / "checkpoints" / "checkpoint-4" / "weights"
    weights.write_text("2")
    settings = Settings(output_dir=str(folder), resume_from_checkpoint="auto")
    with pytest.raises(UserError, match="none of its checkpoints can be read"):
        find("ddp_loop", settings, folder if is_restart else None, silent)
    assert weights.read_text() == "2"


@pytest.mark.parametrize("mark", [None, "", "5d41"])
def test_a_run_that_was_killed_before_its_first_checkpoint_was_complete_starts_again(folder, search, mark):
    path = folder / "checkpoints" / "checkpoint-4" / "COMPLETE"
    if mark is None:
        path.unlink()
    else:
        path.write_text(mark)
    settings = Settings(output_dir=str(folder), resume_from_checkpoint="auto")
    assert search(settings) == (folder, None, False)


def test_auto_never_starts_again_over_a_finished_run(folder, search):
    (folder / "metrics.json").write_text("{}")
    (folder / "checkpoints" / "checkpoint-4" / "COMPLETE").unlink()
    settings = Settings(output_dir=str(folder), resume_from_checkpoint="auto")
    with pytest.raises(UserError, match="holds a finished run"):
        search(settings)


def test_a_checkpoint_outside_a_run_folder_is_refused(folder, tmp_path, search):
    (tmp_path / "precious").mkdir()
    alone = (folder / "checkpoints" / "checkpoint-4").rename(tmp_path / "precious" / "checkpoint-4")
    with pytest.raises(UserError, match="is not inside a run folder"):
        search(Settings(resume_from_checkpoint=str(alone)))
    with pytest.raises(UserError, match="no such folder"):
        search(Settings(resume_from_checkpoint=str(tmp_path / "nowhere" / "checkpoint-4")))


@pytest.mark.parametrize("place", ["", "checkpoints/checkpoint-4"])
def test_a_run_is_resumed_in_its_own_folder_unless_another_is_named(folder, tmp_path, search, place):
    checkpoint = folder / "checkpoints" / "checkpoint-4"
    settings = Settings(resume_from_checkpoint=str(folder / place))
    assert search(settings) == (folder, checkpoint, False)
    settings = Settings(resume_from_checkpoint=str(folder / place), output_dir=str(tmp_path / "new"))
    assert search(settings) == (None, checkpoint, False)


def test_a_restarted_job_resumes_from_the_requested_checkpoint_until_it_has_its_own(folder, tmp_path, search):
    requested = folder / "checkpoints" / "checkpoint-4"
    settings = Settings(output_dir=str(tmp_path / "new"), resume_from_checkpoint=str(requested))
    own = tmp_path / "new"
    own.mkdir()
    assert search(settings, own) == (own, requested, False)
    make_run(own)
    assert search(settings, own) == (own, own / "checkpoints" / "checkpoint-4", False)


def test_a_restarted_job_whose_run_is_complete_has_nothing_left_to_do(folder, search):
    (folder / "metrics.json").write_text("{}")
    assert search(Settings(output_dir=str(folder)), folder) == (folder, None, True)


def test_checkpoints_are_looked_up_only_under_the_lock(folder, monkeypatch):
    """Otherwise another job could write or remove checkpoints after they were found."""
    unlocked = []

    def newest_or_complain(checkpoints, say):
        try:
            os.close(lock(checkpoints.parent))
            unlocked.append(checkpoints)
        except UserError:
            pass
        return checkpoints / "checkpoint-4"

    monkeypatch.setattr(resume_module, "latest_valid_checkpoint", newest_or_complain)
    for settings, own in (
        (Settings(output_dir=str(folder), resume_from_checkpoint="auto"), None),
        (Settings(resume_from_checkpoint=str(folder)), None),
        (Settings(output_dir=str(folder)), folder),
    ):
        found = find("ddp_loop", settings, own, silent)
        os.close(found.lock)
    assert unlocked == []
    held = lock(folder)
    for settings, own in (
        (Settings(output_dir=str(folder), resume_from_checkpoint="auto"), None),
        (Settings(resume_from_checkpoint=str(folder / "checkpoints" / "checkpoint-4")), None),
    ):
        with pytest.raises(UserError, match="has not ended"):
            find("ddp_loop", settings, own, silent)
    os.close(held)


@pytest.mark.parametrize(
    ("content", "owned"),
    [
        ('{"launchers": ["a:1:2.00", "b:7:3.00"]}', True),
        ('{"launchers": ["c:1:2.00"]}', False),
        ('{"launchers": []}', False),
        ("{}", False),
        ("[]", False),
        ('{"launchers": "b:7:3.00"}', False),
        ('{"launchers": [["b:7:3.00"], null]}', False),
        ("not JSON", False),
    ],
)
def test_a_restarted_job_takes_only_a_folder_that_names_one_of_its_launchers(tmp_path, monkeypatch, content, owned):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "ddp_loop" / "2026-01-01_00-00-00"
    run.mkdir(parents=True)
    (run.parent / "latest").symlink_to("somewhere-else")
    (run / "settings.json").write_text(content.replace("{", json.dumps(RECORDED)[:-1] + ", ", 1).replace(", }", "}"))
    launchers = ["b:7:3.00", "d:1:1.00"]
    assert folder_of_this_job("ddp_loop", None, launchers) == (run if owned else None)
    assert folder_of_this_job("ddp_loop", str(run), launchers) == (run if owned else None)
    assert folder_of_this_job("ddp_loop", str(tmp_path / "missing"), launchers) is None
    assert folder_of_this_job("ddp_loop", str(run), []) is None


def test_a_checkpoint_of_an_earlier_format_is_refused_in_one_line(folder):
    with pytest.raises(UserError, match=r"checkpoint-4: has no model\.safetensors: an earlier version"):
        _read_state(folder / "checkpoints" / "checkpoint-4")


def test_a_folder_is_one_job_s_until_that_has_ended(tmp_path):
    held = lock(tmp_path)
    with pytest.raises(UserError, match="has not ended"):
        lock(tmp_path)
    os.close(held)
    os.close(lock(tmp_path))


def test_a_stop_without_its_checkpoint_is_a_failure(tmp_path):
    for saved, outcome in ((6, Preempted), (5, RunError), (None, RunError)):
        checkpoint = tmp_path / f"checkpoint-{saved}" if saved else None
        record = SimpleNamespace(folder=tmp_path, checkpoints=SimpleNamespace(latest_valid=checkpoint))
        assert type(RunRecord.preempted(record, 6, 60)) is outcome
