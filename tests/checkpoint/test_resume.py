"""Which checkpoint a run resumes from, which ones it rejects, what it takes over, and why its results would differ."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.architectures import write_model
from helpers.jobs import write_reviews
from helpers.run_folders import edit_json
from helpers.worlds import fake_world

from app import ddp_loop
from app.checkpoint.manager import RUN_STATE_VERSION
from app.checkpoint.resume import Resume, changes_since, check_compatible, find_checkpoint, find_resume
from app.common.errors import AgreedError, AlreadyFinished, UserError
from app.record.steps import MetricsLog
from app.runs.folder import lock
from app.runs.schema import CHECKPOINTS, EVALUATIONS, METRICS, RUN_STATE, SCHEDULE, SETTINGS, STEPS
from app.settings import Settings
from app.training.prepare import prepare

LAUNCHERS = ["a:1:2.00", "b:7:3.00"]
LATEST_CHECKPOINT = Path(CHECKPOINTS, "checkpoint-4")
FLAGS = {"max_length": 16, "train_batch_size": 8, "max_steps": 6, "eval_strategy": "steps", "eval_steps": 2}
FLAGS |= {"save_strategy": "steps", "save_steps": 4, "use_cpu": True, "disable_tqdm": True}


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory) -> Path:
    """The folder of a run that has finished."""
    folder = tmp_path_factory.mktemp("trained")
    write_reviews(folder / "reviews.csv", 60)
    places = {"csv": str(folder / "reviews.csv"), "model": str(write_model(folder / "model", "bert"))}
    places |= {"cache_dir": str(folder / "cache"), "output_dir": str(folder / "run")}
    ddp_loop.fine_tune(Settings(**places | FLAGS), world)
    return folder / "run"


@pytest.fixture
def folder(trained, tmp_path) -> Path:
    """A copy of its folder, as if it had been killed after checkpoint-4, while it wrote the line of step 6."""
    run = shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns(METRICS.name, "checkpoint-6"))
    (run / STEPS.name).write_text((run / STEPS.name).read_text()[:-9])
    edit_json(run / SETTINGS.name, launchers=LAUNCHERS)
    return run


@pytest.fixture
def found(folder) -> Resume:
    return Resume(folder, folder / LATEST_CHECKPOINT, json.loads((folder / LATEST_CHECKPOINT / RUN_STATE).read_text()))


def check(found: Resume, **changes: Any) -> None:
    """Check whether a run fits that differs from the one so far only in these settings and parts of its content."""
    before = found.state["settings"]
    settings = Settings(**before | {name: value for name, value in changes.items() if name in before})
    content = found.state | changes
    places = {"fingerprint": content["fingerprint"], "total_steps": content["total_steps"]}
    check_compatible(found, settings=settings, identity=content, **places)


@pytest.mark.parametrize(
    ("log", "old", "new", "message"),
    [
        (STEPS.name, '"step": 2', '"step: 2', r"steps\.jsonl: damaged, so the run cannot"),
        (STEPS.name, '"step": 2', '"step": "x"', r"steps\.jsonl: damaged"),
        (STEPS.name, '{"step": 2.*\n', "", r"steps\.jsonl: lacks steps"),
        (EVALUATIONS.name, '{"step": 2', '\0{"step": 2', r"evaluations\.jsonl: damaged"),
    ],
)
def test_a_damaged_log_is_named(folder, found, log, old, new, message):
    check(found)
    (folder / log).write_text(re.sub(old, new, (folder / log).read_text(), count=1))
    with pytest.raises(UserError, match=message):
        check(found)


def test_a_log_whose_line_ends_an_editor_has_changed_goes_on_after_its_last_line(folder, found):
    path, kept = folder / STEPS.name, found.lines_of(STEPS.name)
    path.write_bytes("".join(kept).replace("\n", "\r\n").encode())
    MetricsLog(path, found.lines_of(STEPS.name)).append(['"new"\n'])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [*map(json.loads, kept), "new"]


# ---- what must be equal ----------------------------------------------------------------------------------------------

# Listed a second time, so that a setting which the application wrongly counts as without effect is noticed.
CHANGE_RESULTS = """
    max_length pad_to_multiple_of dropout attn_implementation train_batch_size logical_ranks learning_rate
    lr_scheduler_type warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm train_sampling_strategy
    class_weights label_smoothing_factor seed precision ddp_comm_hook param_dtype reduce_dtype tf32 deterministic
    early_stopping_patience early_stopping_threshold load_best_model_at_end
"""
CONFIG = {"layers": 2, "transformers_version": "5.0", "_name_or_path": "a"}
BEST = {"load_best_model_at_end": True, "validation_size": 0.1, "metric_for_best_model": "loss"}
OTHER_LAYOUT = {"strategy": "zero3", "ddp_bucket_cap_mb": 1, "activation_checkpointing": True, "csv": "moved.csv"}


def test_all_settings_that_change_results_are_named(found):
    same, names = found.state["settings"].copy(), CHANGE_RESULTS.split()
    found.state["settings"].update(dict.fromkeys(names, "another value"))
    with pytest.raises(UserError) as problem:
        check(found, **same)
    assert re.findall(r"(\w+) was another value and is ", str(problem.value)) == names


@pytest.mark.parametrize(
    ("settings", "changes", "named"),
    [
        ({}, OTHER_LAYOUT | {"logging_steps": 3, "save_steps": 7}, None),
        ({}, {"metric_for_best_model": "f1", "eval_batch_size": 7}, None),  # there are no best weights
        (BEST, {}, None),
        (BEST, {"metric_for_best_model": "f1"}, "metric_for_best_model was loss and is f1"),
        (BEST, {"positive_class": "0"}, "positive_class was None and is 0"),
        (BEST, {"eval_batch_size": 7}, "eval_batch_size was 64 and is 7"),
        ({}, {"total_steps": 7}, "total steps was 6 and is 7"),
        ({}, {"fingerprint": "b"}, "split fingerprint was .* and is b"),
        ({}, {"model_commit": "b"}, "the model's commit was None and is b"),
        ({}, {"model_code_sha256": "b"}, "the model's Python code has changed"),
        ({}, {"model_config": CONFIG | {"_name_or_path": "b"}}, None),
        ({}, {"model_config": CONFIG | {"new": 1}}, "the model's config has changed: new"),
        ({}, {"model_config": CONFIG | {"new": 1, "transformers_version": "6.0"}}, None),  # which may add defaults
    ],
)
def test_the_layout_and_places_may_change_but_not_what_results_depend_on(found, settings, changes, named):
    found.state["settings"].update(settings)
    found.state["model_config"] = CONFIG
    with nullcontext() if named is None else pytest.raises(UserError, match=f"cannot resume from .*: {named}$"):
        check(found, **changes)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("config.json", '"hidden_dropout_prob": 0.1', '"hidden_dropout_prob": 0.5', "config .*: hidden_dropout_prob"),
        ("tokenizer.json", '"好":', '"坏":', "tokenizer returns other tokens .*"),
        ("tokenizer_config.json", '"pad_token": "[PAD]"', '"pad_token": "[UNK]"', "tokenizer .* pads differently; .*"),
    ],
)
def test_a_model_may_have_moved_but_not_changed(found, tmp_path, world, file, old, new, message):
    model = write_model(tmp_path / "model", "bert")
    moved = {"model": str(model), "resume_from_checkpoint": str(found.checkpoint)}
    same = Settings(**found.state["settings"] | moved)
    os.close(prepare("ddp_loop", replace(same, output_dir=str(tmp_path / "new")), world).lock)
    (model / file).write_text((model / file).read_text("utf-8").replace(old, new, 1), "utf-8")
    with pytest.raises(AgreedError, match=f"cannot resume from .* {message}$"):
        prepare("ddp_loop", replace(same, output_dir=str(tmp_path / "newer")), world)


# ---- what makes a resumed run differ from an uninterrupted one -------------------------------------------------------


@pytest.mark.parametrize(("device", "ranks"), [("cpu", 1), ("cpu", 4), ("cuda", 4)])
def test_only_changes_that_affect_rounding_or_dropout_are_listed(found, device, ranks):
    facts = {"device": ["A"], "MKL_CBWR": ["COMPATIBLE"]}
    same = found.state | {"arithmetic": facts, "threads": 3}
    settings = Settings(**same["settings"] | {"strategy": "zero3"})
    other = same | {"torch": "1.0", "transformers": "2.0", "arithmetic": {"device": ["B", "C"], "MKL_CBWR": ["unset"]}}
    values = {"gradient_accumulation_steps": 2, "threads": 1, "cpu_offload": True, "eval_batch_size": 7}

    def changes(before: dict[str, Any], now: Settings) -> list[str]:
        return list(changes_since(before, now, fake_world(0, ranks, device), arithmetic=facts))

    assert changes(same, settings) == changes(same, replace(settings, threads=3)) == []
    assert changes(same | {"arithmetic": {}}, settings) == [], "an older version recorded nothing"
    assert changes({}, replace(settings, **values)) == [], "of a new run"
    assert changes(other, replace(settings, **values)) == [
        *("device: A, was B, C", "MKL_CBWR: COMPATIBLE, was unset"),
        *(f"torch: {torch.__version__}, was 1.0", f"transformers: {transformers.__version__}, was 2.0"),
        *("gradient_accumulation_steps: 2, was 1", "threads: 1, was 3"),
        *(["cpu_offload: True, was False"] if device == "cuda" else []),  # on a CPU, the optimizer is always there
        "eval_batch_size: 7, was 64",
    ]


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_the_checkpoint_or_else_the_folder_determines_what_is_taken_over(folder, world, has_checkpoint):
    """A later start in the same folder may have written settings.json, so a checkpoint has settings of its own."""
    checkpoint = folder / LATEST_CHECKPOINT
    edit_json(checkpoint / RUN_STATE, threads=3)
    edit_json(folder / SETTINGS.name, logical_ranks=2, threads=7)
    if not has_checkpoint:  # a restarted job, perhaps on other nodes, begins the same training again
        checkpoint.rename(checkpoint.with_name(".checkpoint-4.tmp"))
    settings = Settings(output_dir=str(folder), resume_from_checkpoint="auto", threads=1)
    found = find_resume("ddp_loop", settings, world)
    os.close(found.lock)
    assert (found.folder, found.checkpoint, found.step) == (folder, *((checkpoint, 4) if has_checkpoint else (None, 0)))
    assert (found.recorded["logical_ranks"], found.recorded["threads"]) == ((1, 3) if has_checkpoint else (2, 7))
    assert found.changes == (("threads: 1, was 3",) if has_checkpoint else ())


# ---- which checkpoint ------------------------------------------------------------------------------------------------


def search(launchers: Collection[str] = (), **places: Any) -> tuple[Path, Path]:
    """Return the folder and the checkpoint that are found, and release the lock, as the end of the process would."""
    settings = Settings(**{name: str(place) for name, place in places.items()})
    found = find_checkpoint("ddp_loop", settings, launchers, warn=print)
    if found.lock is not None:
        with pytest.raises(UserError, match="has not ended"):
            lock(found.folder)
        os.close(found.lock)
    return found.folder, found.checkpoint


def test_auto_continues_the_run_in_the_folder_or_the_latest_one(folder, tmp_path, monkeypatch, world):
    found = (folder, folder / LATEST_CHECKPOINT)
    assert search(output_dir=folder, resume_from_checkpoint="auto") == found
    assert search(output_dir=tmp_path / "new", resume_from_checkpoint="auto") == (None, None)
    monkeypatch.chdir(tmp_path)
    assert search(resume_from_checkpoint="auto") == (None, None)
    Path("runs/ddp_loop").mkdir(parents=True)
    Path("runs/ddp_loop/latest").symlink_to(folder)
    assert search(resume_from_checkpoint="auto") == found
    (folder / METRICS.name).write_text("{}")
    assert search(resume_from_checkpoint="auto") == (None, None)
    for output_dir, requested in ((str(folder), "auto"), (None, str(folder))):
        with pytest.raises(AlreadyFinished, match="has finished; nothing is left to do"):
            find_resume("ddp_loop", Settings(output_dir=output_dir, resume_from_checkpoint=requested), world)


@pytest.mark.parametrize("content", ['{"path": "/usr/bin", "editor.fontSize": 12}', "", "[]", "not JSON"])
def test_auto_leaves_the_folder_of_another_program_alone(tmp_path, content):
    (tmp_path / SETTINGS.name).write_text(content)
    assert search(output_dir=tmp_path, resume_from_checkpoint="auto") == (None, None)
    assert [path.name for path in tmp_path.iterdir()] == [SETTINGS.name]


@pytest.mark.parametrize("place", ["", LATEST_CHECKPOINT])
@pytest.mark.parametrize("new", [{}, {"output_dir": "new"}])
def test_a_run_is_continued_and_a_checkpoint_starts_a_new_run(folder, place, new):
    found = search(resume_from_checkpoint=folder / place, **new)
    assert found == (None if place or new else folder, folder / LATEST_CHECKPOINT)


@pytest.mark.parametrize("restart", [{"resume_from_checkpoint": "auto"}, {"launchers": LAUNCHERS}])
def test_a_damaged_checkpoint_is_skipped_and_only_damaged_ones_are_no_reason_to_start_again(folder, capsys, restart):
    checkpoints = folder / CHECKPOINTS
    shutil.copytree(folder / LATEST_CHECKPOINT, checkpoints / "checkpoint-8")
    (checkpoints / "checkpoint-8" / SCHEDULE).write_text("[]")
    other_job = lock(folder)
    with pytest.raises(UserError, match="has not ended"):  # so its checkpoints are not looked up yet
        search(output_dir=folder, **restart)
    with pytest.raises(UserError, match="has not ended"):
        search(resume_from_checkpoint=folder)
    os.close(other_job)
    assert search(output_dir=folder, **restart) == (folder, folder / LATEST_CHECKPOINT)
    skipped = f"{checkpoints / 'checkpoint-8'} is skipped: {SCHEDULE} has changed since it was written\n"
    assert capsys.readouterr().out == skipped
    (folder / LATEST_CHECKPOINT / SCHEDULE).unlink()
    with pytest.raises(UserError, match=rf"none of its checkpoints can be used: checkpoint-4: {SCHEDULE} is missing"):
        search(output_dir=folder, **restart)
    assert len(list(checkpoints.iterdir())) == 2, "nothing is removed"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("checkpoint-good", "can only be resumed as checkpoint-<step>, under the name it was written with"),
        ("edited", r"edited/checkpoints/checkpoint-4/run_state.json: lacks settings, total_steps: "),
        ("run", "another version of this program wrote it: resume it with that version"),
        ("unmounted", r"checkpoints: links to .*disk, which does not exist"),
    ],
)
def test_what_is_no_checkpoint_is_named(folder, tmp_path, name, message):
    (tmp_path / "unmounted").mkdir()
    shutil.copytree(folder / LATEST_CHECKPOINT, tmp_path / "checkpoint-good")
    file = shutil.copytree(folder, tmp_path / "edited") / LATEST_CHECKPOINT / RUN_STATE
    state = json.loads(file.read_text())
    file.write_text(json.dumps({key: state[key] for key in state if key not in ("settings", "total_steps")}))
    edit_json(folder / LATEST_CHECKPOINT / RUN_STATE, format_version=RUN_STATE_VERSION - 1)
    (tmp_path / "unmounted" / CHECKPOINTS).symlink_to("disk")
    with pytest.raises(UserError, match=message):
        search(resume_from_checkpoint=tmp_path / name)


@pytest.mark.parametrize(("launchers", "is_own"), [(LAUNCHERS, True), (["c:1:2.00"], False), (None, False)])
def test_a_restarted_job_recognizes_its_folder_by_its_launchers(folder, tmp_path, monkeypatch, launchers, is_own):
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(folder, tmp_path / "runs" / "ddp_loop" / "2026-01-01_00-00-00")
    (run.parent / "latest").symlink_to("somewhere-else")
    edit_json(run / SETTINGS.name, launchers=launchers)
    mine, new = ["b:7:3.00", "d:1:1.00"], {"output_dir": "new", "resume_from_checkpoint": run}
    own, none = (run, run / LATEST_CHECKPOINT), (None, None)
    assert search(launchers=mine) == search(launchers=mine, output_dir=run) == (own if is_own else none)
    assert search(launchers=mine, **new) == (own if is_own else (None, own[1]))
    assert search() == search(output_dir=run) == none, "without torchrun"


def test_a_restarted_job_resumes_from_the_requested_checkpoint_until_it_has_its_own(folder, tmp_path):
    own = shutil.copytree(folder, tmp_path / "new")
    places = {"output_dir": own, "resume_from_checkpoint": folder / LATEST_CHECKPOINT}
    assert search(launchers=LAUNCHERS, **places) == (own, own / LATEST_CHECKPOINT)
    shutil.rmtree(own / CHECKPOINTS)
    assert search(launchers=LAUNCHERS, **places) == (own, folder / LATEST_CHECKPOINT)
