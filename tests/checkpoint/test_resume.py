"""Which checkpoint a run resumes from, which ones it rejects, what it takes over, and why its results would differ."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.run_folders import edit_json
from helpers.worlds import fake_world

from app.checkpoint.manager import RUN_STATE_VERSION
from app.checkpoint.resume import Resume, changes_since, check_compatible, find_checkpoint, find_resume, find_run
from app.common.errors import AlreadyFinished, UserError
from app.common.machine import device_name
from app.record.steps import MetricsLog
from app.runs.folder import lock
from app.runs.hashes import hash_files
from app.runs.schema import CHECKPOINTS, EVALUATIONS, METRICS, RUN_STATE, SCHEDULE, SETTINGS, STEPS
from app.settings import Settings

LAUNCHERS = ["a:1:2.00", "b:7:3.00"]
VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__}
IDENTITY = dict.fromkeys(("model_commit", "model_config", "model_code_sha256", "tokens_sha256"))
LATEST_CHECKPOINT = Path(CHECKPOINTS, "checkpoint-4")


def make_run(folder: Path, **settings: Any) -> Path:
    """Write the folder of a run that was killed after its checkpoint-4, in the middle of writing step 6."""
    state = {"path": "ddp_loop", "step": 4, "total_steps": 9, "fingerprint": "f", "threads": 3, "arithmetic": {}}
    state |= {"settings": Settings(learning_rate=1e-3, **settings).as_dict()} | VERSIONS | IDENTITY
    write_checkpoint(folder / LATEST_CHECKPOINT, state)
    write_checkpoint(folder / CHECKPOINTS / "best-2", {})
    recorded = {"path": "ddp_loop", "world_size": 1, "csv": "reviews.csv", "train_batch_size": 8}
    (folder / SETTINGS.name).write_text(json.dumps(recorded | {"launchers": LAUNCHERS}))
    (folder / STEPS.name).write_text("".join(map(line_of, range(1, 6))) + '{"step": 6, "lo')
    (folder / EVALUATIONS.name).write_text(line_of(2) + line_of(5))
    return folder


def write_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint whose schedule.json is its only other file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SCHEDULE).write_text("{}")
    state = {"format_version": RUN_STATE_VERSION, "files": {SCHEDULE: hash_files(folder / SCHEDULE)}} | state
    (folder / RUN_STATE).write_text(json.dumps(state))


def line_of(step: int) -> str:
    return json.dumps({"step": step, "loss": 1.5}) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def resume(folder: Path) -> Resume:
    return Resume(folder, folder / LATEST_CHECKPOINT, json.loads((folder / LATEST_CHECKPOINT / RUN_STATE).read_text()))


def check(found: Resume, identity: Mapping[str, Any] = IDENTITY, /, **settings: Any) -> None:
    mine = Settings(learning_rate=1e-3, max_length=256, **settings)
    check_compatible(found, settings=mine, fingerprint="f", total_steps=9, identity=identity)


@pytest.mark.parametrize(
    ("log", "old", "new", "message"),
    [
        (STEPS.name, '"step": 2', '"step: 2', r"steps\.jsonl: damaged, so the run cannot"),
        (STEPS.name, '"step": 2', '"step": "x"', r"steps\.jsonl: damaged"),
        (STEPS.name, line_of(2), "", r"steps\.jsonl: lacks steps"),
        (EVALUATIONS.name, line_of(2), "\0" + line_of(2), r"evaluations\.jsonl: damaged"),
    ],
)
def test_a_damaged_log_is_named(folder, log, old, new, message):
    check(resume(folder))
    (folder / log).write_text((folder / log).read_text().replace(old, new))
    with pytest.raises(UserError, match=message):
        check(resume(folder))
    (folder / STEPS.name).unlink()
    with pytest.raises(UserError, match=r"steps\.jsonl: lacks steps"):
        check(resume(folder))


def test_a_log_whose_line_ends_an_editor_has_changed_goes_on_after_its_last_line(folder):
    path, kept = folder / STEPS.name, resume(folder).lines_of(STEPS.name)
    path.write_bytes("".join(kept).replace("\n", "\r\n").encode())
    MetricsLog(path, resume(folder).lines_of(STEPS.name)).append(['"new"\n'])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [*map(json.loads, kept), "new"]


# ---- what must be equal ----------------------------------------------------------------------------------------------

# Listed a second time, so that a setting which the application wrongly counts as without effect is noticed.
CHANGE_RESULTS = """
    max_length pad_to_multiple_of dropout attn_implementation train_batch_size logical_ranks learning_rate
    lr_scheduler_type warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm train_sampling_strategy
    class_weights label_smoothing_factor seed precision ddp_comm_hook param_dtype reduce_dtype tf32 deterministic
    early_stopping_patience early_stopping_threshold load_best_model_at_end
"""
CONFIG = {"layers": 2, "heads": 3, "transformers_version": "5.0", "_name_or_path": "a"}


def test_all_differences_that_change_results_are_named(folder):
    found, names = resume(folder), CHANGE_RESULTS.split()
    found.state["settings"] |= dict.fromkeys(names, "another value")
    found.state.update(model_config=CONFIG, model_commit="a", model_code_sha256="b", tokens_sha256="c")
    with pytest.raises(UserError) as problem:
        check(found, IDENTITY | {"model_config": CONFIG | {"layers": 3}})
    text = str(problem.value)
    assert re.findall(r"(\w+) was another value and is ", text) == names
    assert text.split("; ")[len(names) :] == [
        "the model's commit was a and is None",
        "the model's Python code has changed",
        "the tokenizer returns other tokens for the same reviews, or pads differently",
        "the model's config has changed: layers",
    ]


def test_a_model_may_have_moved_and_a_newer_library_may_add_defaults_to_its_config(folder):
    found = resume(folder)
    found.state["model_config"], found.state["settings"]["model"] = CONFIG, "./moved/away"
    check(found, IDENTITY | {"model_config": CONFIG | {"_name_or_path": "b"}}, model=str(folder))
    check(found, IDENTITY | {"model_config": CONFIG | {"transformers_version": "6.0", "new": 1}}, model=str(folder))
    with pytest.raises(UserError, match=r"the model's config has changed: new$"):
        check(found, IDENTITY | {"model_config": CONFIG | {"new": 1}}, model=str(folder))


BEST = {"load_best_model_at_end": True, "validation_size": 0.1, "metric_for_best_model": "loss"}
OTHER_LAYOUT = {"ddp_bucket_cap_mb": 1, "logging_steps": 3, "save_steps": 7, "activation_checkpointing": True}


@pytest.mark.parametrize(
    ("before", "changes", "named"),
    [
        *(({}, {"strategy": strategy} | OTHER_LAYOUT, None) for strategy in ("zero1", "zero2", "zero3")),
        ({}, {"metric_for_best_model": "f1", "eval_batch_size": 7}, None),  # there are no best weights
        (BEST, {}, None),
        (BEST, {"metric_for_best_model": "f1"}, "metric_for_best_model"),
        (BEST, {"eval_batch_size": 7}, "eval_batch_size"),
    ],
)
def test_the_layout_may_change_but_not_the_criterion_for_the_best_weights(tmp_path, before, changes, named):
    run = make_run(tmp_path / "run", **before)
    with nullcontext() if named is None else pytest.raises(UserError, match=f": {named} was [^;]*$"):
        check(resume(run), **before | changes)


# ---- what makes a resumed run differ from an uninterrupted one -------------------------------------------------------

CPU = device_name(torch.device("cpu"))
ARITHMETIC = {"device": [CPU], "MKL_CBWR": ["COMPATIBLE"]}


@pytest.mark.parametrize(("device", "ranks"), [("cpu", 1), ("cpu", 4), ("cuda", 4)])
def test_only_changes_that_affect_rounding_or_dropout_are_listed(device, ranks):
    settings = Settings(gradient_accumulation_steps=2, strategy="zero3")
    same = {"settings": settings.as_dict() | {"strategy": "ddp"}, "threads": 3, "arithmetic": ARITHMETIC} | VERSIONS
    other = same | {"torch": "1.0", "transformers": "2.0", "arithmetic": {"device": ["A", "B"], "MKL_CBWR": ["unset"]}}
    values = {"gradient_accumulation_steps": 1, "threads": 1, "cpu_offload": True, "eval_batch_size": 7}

    def changes(before: dict[str, Any], now: Settings) -> list[str]:
        return list(changes_since(before, now, fake_world(0, ranks, device), arithmetic=ARITHMETIC))

    assert changes(same, settings) == changes(same, replace(settings, threads=3)) == []
    assert changes(same | {"arithmetic": {}}, settings) == [], "an older version recorded nothing"
    assert changes({}, replace(settings, **values)) == [], "of a new run"
    assert changes(other, replace(settings, **values)) == [
        *(f"device: {CPU}, was A, B", "MKL_CBWR: COMPATIBLE, was unset"),
        *(f"torch: {torch.__version__}, was 1.0", f"transformers: {transformers.__version__}, was 2.0"),
        *("gradient_accumulation_steps: 1, was 2", "threads: 1, was 3"),
        *(["cpu_offload: True, was False"] if device == "cuda" else []),  # on a CPU, the optimizer is always there
        "eval_batch_size: 7, was 64",
    ]


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_the_checkpoint_or_else_the_folder_determines_what_is_taken_over(folder, world, has_checkpoint):
    """A later start in the same folder may have written settings.json, so a checkpoint has settings of its own."""
    checkpoint, state = folder / LATEST_CHECKPOINT, resume(folder).state
    write_checkpoint(checkpoint, state | {"settings": state["settings"] | {"logical_ranks": 4}})
    edit_json(folder / SETTINGS.name, logical_ranks=2, threads=7)
    if not has_checkpoint:  # a restarted job, perhaps on other nodes, begins the same training again
        checkpoint.rename(checkpoint.with_name(".checkpoint-4.tmp"))
    settings = Settings(output_dir=str(folder), resume_from_checkpoint="auto", threads=1)
    found = find_resume("ddp_loop", settings, world)
    os.close(found.lock)
    assert (found.folder, found.checkpoint, found.step) == (folder, *((checkpoint, 4) if has_checkpoint else (None, 0)))
    assert (found.recorded["logical_ranks"], found.recorded["threads"]) == ((4, 3) if has_checkpoint else (2, 7))
    assert found.changes == (("threads: 1, was 3",) if has_checkpoint else ())


# ---- which checkpoint ------------------------------------------------------------------------------------------------


def search(launchers: list[str], /, path_name: str = "ddp_loop", **places: Any) -> tuple[Path | None, Path | None]:
    """Return the folder and the checkpoint that are found, and release the lock, as the end of the process would."""
    settings = Settings(**{name: str(place) for name, place in places.items()})
    found = find_checkpoint(path_name, settings, launchers, warn=print)
    if found.lock is not None:
        with pytest.raises(UserError, match="has not ended"):
            lock(found.folder)
        os.close(found.lock)
    return found.folder, found.checkpoint


def test_auto_continues_the_run_in_the_folder_or_the_latest_one(folder, tmp_path, monkeypatch, world):
    found = (folder, folder / LATEST_CHECKPOINT)
    assert search([], output_dir=folder, resume_from_checkpoint="auto") == found
    assert search([], output_dir=tmp_path / "new", resume_from_checkpoint="auto") == (None, None)
    monkeypatch.chdir(tmp_path)
    assert search([], resume_from_checkpoint="auto") == (None, None)
    Path("runs/ddp_loop").mkdir(parents=True)
    Path("runs/ddp_loop/latest").symlink_to(folder)
    assert search([], resume_from_checkpoint="auto") == found
    (folder / METRICS.name).write_text("{}")
    assert search([], resume_from_checkpoint="auto") == (None, None)
    for settings in (
        Settings(output_dir=str(folder), resume_from_checkpoint="auto"),
        Settings(resume_from_checkpoint=str(folder)),
    ):
        with pytest.raises(AlreadyFinished, match="has finished; nothing is left to do"):
            find_resume("ddp_loop", settings, world)


@pytest.mark.parametrize("content", ['{"path": "/usr/bin", "editor.fontSize": 12}', "", "[]", "not JSON"])
def test_auto_leaves_the_folder_of_another_program_alone(tmp_path, content):
    (tmp_path / SETTINGS.name).write_text(content)
    assert search([], output_dir=tmp_path, resume_from_checkpoint="auto") == (None, None)
    assert [path.name for path in tmp_path.iterdir()] == [SETTINGS.name]


@pytest.mark.parametrize("path_name", ["ddp_loop", "trainer_run"])  # either resumes what the other one has written
@pytest.mark.parametrize("place", ["", LATEST_CHECKPOINT])
@pytest.mark.parametrize("new", [{}, {"output_dir": "new"}])
def test_a_run_is_continued_and_a_checkpoint_starts_a_new_run(folder, path_name, place, new):
    found = search([], path_name, resume_from_checkpoint=folder / place, **new)
    assert found == (None if place or new else folder, folder / LATEST_CHECKPOINT)


@pytest.mark.parametrize("is_restart", [False, True])
def test_a_damaged_checkpoint_is_skipped_and_only_damaged_ones_are_no_reason_to_start_again(folder, capsys, is_restart):
    places = {"output_dir": folder} | ({} if is_restart else {"resume_from_checkpoint": "auto"})
    launchers, checkpoints = LAUNCHERS if is_restart else [], folder / CHECKPOINTS
    shutil.copytree(folder / LATEST_CHECKPOINT, checkpoints / "checkpoint-8")
    (checkpoints / "checkpoint-8" / SCHEDULE).write_text("[]")
    assert search(launchers, **places) == (folder, folder / LATEST_CHECKPOINT)
    skipped = f"{checkpoints / 'checkpoint-8'} is skipped: {SCHEDULE} has changed since it was written\n"
    assert capsys.readouterr().out == skipped
    (folder / LATEST_CHECKPOINT / SCHEDULE).unlink()
    with pytest.raises(UserError, match=rf"none of its checkpoints can be used: checkpoint-4: {SCHEDULE} is missing"):
        search(launchers, **places)
    assert len(list(checkpoints.iterdir())) == 3, "nothing is removed"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "has no complete checkpoint"),
        ("checkpoint-good", "only checkpoint-<step>, under the name that it was written with"),
        ("run/checkpoints/best-2", "only checkpoint-<step>, under the name that it was written with"),
        ("run", "another version of this program wrote it: resume it with that version"),
        ("unmounted", r"checkpoints: links to .*disk, which does not exist"),
    ],
)
def test_what_is_no_checkpoint_is_named(folder, tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    shutil.copytree(folder / LATEST_CHECKPOINT, tmp_path / "checkpoint-good")
    edit_json(folder / LATEST_CHECKPOINT / RUN_STATE, format_version=RUN_STATE_VERSION - 1)
    shutil.rmtree(make_run(tmp_path / "unmounted") / CHECKPOINTS)
    (tmp_path / "unmounted" / CHECKPOINTS).symlink_to("disk")
    with pytest.raises(UserError, match=message):
        search([], resume_from_checkpoint=tmp_path / name)


def test_a_folder_is_locked_before_its_checkpoints_are_looked_up(folder):
    held = lock(folder)
    shutil.rmtree(folder / LATEST_CHECKPOINT)
    for launchers, places in (
        ([], {"output_dir": folder, "resume_from_checkpoint": "auto"}),
        ([], {"resume_from_checkpoint": folder}),
        (LAUNCHERS, {"output_dir": folder}),
    ):
        with pytest.raises(UserError, match="has not ended"):
            search(launchers, **places)
    os.close(held)


@pytest.mark.parametrize(("launchers", "is_own"), [(LAUNCHERS, True), (["c:1:2.00"], False), (None, False)])
def test_a_restarted_job_recognizes_its_folder_by_its_launchers(tmp_path, monkeypatch, launchers, is_own):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs" / "ddp_loop" / "2026-01-01_00-00-00")
    (run.parent / "latest").symlink_to("somewhere-else")
    edit_json(run / SETTINGS.name, launchers=launchers)
    mine = ["b:7:3.00", "d:1:1.00"]
    for place, source in (({}, None), ({"output_dir": str(run)}, None), ({"output_dir": "new"}, run)):
        assert find_run("ddp_loop", Settings(**place), mine, source=source) == (run if is_own else None)
        assert find_run("ddp_loop", Settings(**place), [], source=source) is None


def test_a_restarted_job_resumes_from_the_requested_checkpoint_until_it_has_its_own(folder, tmp_path):
    own = make_run(tmp_path / "new")
    places = {"output_dir": own, "resume_from_checkpoint": folder / LATEST_CHECKPOINT}
    assert search(LAUNCHERS, **places) == (own, own / LATEST_CHECKPOINT)
    shutil.rmtree(own / CHECKPOINTS)
    assert search(LAUNCHERS, **places) == (own, folder / LATEST_CHECKPOINT)
