"""Which checkpoint a run resumes from, which ones it rejects, what it takes over, and why its results would differ."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoint.killed_run import (
    CPU,
    FINGERPRINT,
    IDENTITY,
    TOTAL,
    evaluation_line,
    make_run,
    step_line,
    write_checkpoint,
)
from helpers.run_folders import edit_json
from helpers.worlds import fake_world

from app.checkpoint.resume import (
    MUST_BE_EQUAL,
    Resume,
    changes_since,
    check_compatible,
    find_checkpoint,
    find_resume,
    find_run,
)
from app.common.errors import AlreadyFinished, UserError
from app.runs.folder import lock
from app.runs.schema import CHECKPOINTS, EVALUATIONS, METRICS, RUN_STATE, SCHEDULE, SETTINGS, STEPS
from app.settings import Settings


def resume(folder: Path) -> Resume:
    checkpoint = folder / CHECKPOINTS / "checkpoint-4"
    return Resume(folder, checkpoint, json.loads((checkpoint / RUN_STATE).read_text()))


def check(found: Resume, identity: Mapping[str, Any] = IDENTITY, /, **settings: Any) -> None:
    check_compatible(
        found,
        settings=Settings(learning_rate=1e-3, max_length=256, num_train_epochs=6, **settings),
        fingerprint=FINGERPRINT,
        total_steps=TOTAL,
        identity=identity,
    )


def test_log_lines_after_the_checkpoint_are_dropped(folder):
    assert resume(folder).lines_of(STEPS.name) == list(map(step_line, range(1, 5)))
    (folder / EVALUATIONS.name).write_text("".join(map(evaluation_line, (2, 4, 5))))
    assert resume(folder).lines_of(EVALUATIONS.name) == [evaluation_line(2), evaluation_line(4)]
    check(resume(folder))


@pytest.mark.parametrize(
    ("log", "old", "new", "message"),
    [
        (STEPS.name, '"step": 2', '"step: 2', r"steps\.jsonl: damaged, so the run cannot"),
        (STEPS.name, step_line(2), "[]\n", r"steps\.jsonl: damaged"),
        (STEPS.name, '"step": 2', '"step": "x"', r"steps\.jsonl: damaged"),
        (STEPS.name, step_line(2), "", r"steps\.jsonl: lacks steps"),
        (EVALUATIONS.name, evaluation_line(2), "\0" + evaluation_line(2), r"evaluations\.jsonl: damaged"),
    ],
)
def test_a_damaged_log_is_named(folder, log, old, new, message):
    content = (folder / log).read_text()
    (folder / log).write_text(content.replace(old, new))
    with pytest.raises(UserError, match=message):
        check(resume(folder))
    (folder / STEPS.name).unlink()
    with pytest.raises(UserError, match=r"steps\.jsonl: lacks steps"):
        check(resume(folder))


# ---- what must be equal ----------------------------------------------------------------------------------------------

CHANGE_RESULTS = [
    "max_length",
    "pad_to_multiple_of",
    "dropout",
    "attn_implementation",
    "train_batch_size",
    "logical_ranks",
]
CHANGE_RESULTS += ["learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2"]
CHANGE_RESULTS += [
    "adam_epsilon",
    "max_grad_norm",
    "train_sampling_strategy",
    "class_weights",
    "label_smoothing_factor",
    "seed",
]
CHANGE_RESULTS += ["precision", "ddp_comm_hook", "param_dtype", "reduce_dtype", "tf32", "deterministic"]
CHANGE_RESULTS += ["early_stopping_patience", "early_stopping_threshold", "load_best_model_at_end"]


@pytest.mark.parametrize("name", sorted({*CHANGE_RESULTS, *MUST_BE_EQUAL}))
def test_a_setting_that_changes_results_must_be_equal(folder, name):
    found = resume(folder)
    found.state["settings"][name] = "another value"
    with pytest.raises(UserError, match=f": {name} was another value and is "):
        check(found)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_what_does_not_affect_the_bits_may_change(folder, strategy):
    flags = {"ddp_bucket_cap_mb": 1, "logging_steps": 3, "save_steps": 7, "activation_checkpointing": True}
    check(resume(folder), strategy=strategy, **flags)


BEST = {"load_best_model_at_end": True, "validation_size": 0.1, "metric_for_best_model": "loss"}


@pytest.mark.parametrize(
    "change", [{"metric_for_best_model": "f1"}, {"load_best_model_at_end": False}, {"eval_batch_size": 7}]
)
def test_the_criterion_for_the_best_weights_cannot_change(tmp_path, change):
    run = make_run(tmp_path / "run", **BEST)
    check(resume(run), **BEST)
    with pytest.raises(UserError, match=f"{next(iter(change))} was "):
        check(resume(run), **BEST | change)


CONTENT = {"model_commit": None, "model_config": {"layers": 2, "architectures": None, "transformers_version": "5.0"}}
CONTENT |= {"model_code_sha256": None, "tokens_sha256": "a"}
NEWER = {"transformers_version": "6.0", "heads": 3}  # with a default that the older version did not have


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ({"architectures": ["Bert"], "_name_or_path": "x"}, {}, None),
        (NEWER, {}, None),
        (NEWER | {"layers": 3}, {}, "has changed: layers$"),
        ({"layers": 3}, {}, "the model's config has changed: layers$"),
        ({"heads": 3}, {}, "has changed: heads$"),
        ({}, {"model_commit": "a" * 40}, f"the model's commit was None and is {'a' * 40}"),
        ({}, {"model_code_sha256": "b"}, "the model's Python code has changed$"),
        ({}, {"tokens_sha256": "b"}, "the tokenizer returns other tokens for the same reviews, or pads differently$"),
    ],
)
def test_only_the_content_of_a_model_counts_not_its_place(folder, config, changes, message):
    found = resume(folder)
    found.state.update(CONTENT)
    found.state["settings"]["model"] = "./moved/away"
    identity = CONTENT | {"model_config": CONTENT["model_config"] | config} | changes
    with nullcontext() if message is None else pytest.raises(UserError, match=message):
        check(found, identity, model=str(folder))


# ---- what makes a resumed run differ from an uninterrupted one -------------------------------------------------------

ARITHMETIC = {"device": [CPU], "MKL_CBWR": ["COMPATIBLE"]}
BEFORE = {"torch": torch.__version__, "transformers": transformers.__version__, "threads": 3, "arithmetic": ARITHMETIC}
BEFORE |= {"settings": {"gradient_accumulation_steps": 2, "eval_batch_size": 64, "cpu_offload": False}}


@pytest.mark.parametrize(
    ("before", "flags", "device", "expected"),
    [
        ({}, {}, "cpu", []),
        ({}, {"threads": 3}, "cpu", []),
        ({}, {"threads": 1}, "cpu", ["threads: 1, was 3"]),
        ({}, {"gradient_accumulation_steps": 1}, "cpu", ["gradient_accumulation_steps: 1, was 2"]),
        ({}, {"eval_batch_size": 7}, "cpu", ["eval_batch_size: 7, was 64"]),
        ({}, {"strategy": "zero3", "cpu_offload": True}, "cuda", ["cpu_offload: True, was False"]),
        ({}, {"strategy": "zero3", "cpu_offload": True}, "cpu", []),  # the optimizer has always been there
        ({"torch": "1.0"}, {}, "cpu", [f"torch: {torch.__version__}, was 1.0"]),
        ({"transformers": "1.0"}, {}, "cpu", [f"transformers: {transformers.__version__}, was 1.0"]),
        ({"arithmetic": {}}, {}, "cpu", []),  # an older version recorded nothing
        ({"arithmetic": {"device": ["A", "B"]}}, {}, "cpu", [f"device: {CPU}, was A, B"]),
        ({"arithmetic": ARITHMETIC | {"MKL_CBWR": ["unset"]}}, {}, "cpu", ["MKL_CBWR: COMPATIBLE, was unset"]),
    ],
)
def test_changes_that_affect_rounding_or_dropout_are_listed(before, flags, device, expected):
    settings = Settings(**{"gradient_accumulation_steps": 2} | flags)
    for strategy, ranks in product(("ddp", "zero1", "zero2", "zero3"), (1, 2, 4)):
        mine = settings if flags.get("strategy") else replace(settings, strategy=strategy)
        world = fake_world(0, ranks, device)
        assert list(changes_since(BEFORE | before, mine, world, arithmetic=ARITHMETIC)) == expected
    assert changes_since({}, settings, fake_world(), arithmetic=ARITHMETIC) == (), "of a new run"


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_the_checkpoint_or_else_the_folder_determines_what_is_taken_over(folder, world, has_checkpoint):
    """A later start in the same folder may have written settings.json, so a checkpoint has settings of its own."""
    checkpoint = folder / CHECKPOINTS / "checkpoint-4"
    state = json.loads((checkpoint / RUN_STATE).read_text())
    state["settings"]["logical_ranks"] = 4
    write_checkpoint(checkpoint, state)
    edit_json(folder / SETTINGS.name, logical_ranks=2, threads=7)
    if not has_checkpoint:  # a restarted job, perhaps on other nodes, begins the same training again
        checkpoint.rename(checkpoint.with_name(".checkpoint-4.tmp"))
    settings = Settings(output_dir=str(folder), resume_from_checkpoint="auto", threads=1)
    found = find_resume("ddp_loop", settings, world)
    os.close(found.lock)
    assert (found.folder, found.checkpoint, found.step) == (folder, *((checkpoint, 4) if has_checkpoint else (None, 0)))
    assert (found.recorded["logical_ranks"], found.recorded["threads"]) == ((4, 3) if has_checkpoint else (2, 7))
    assert found.changes == (("threads: 1, was 3",) if has_checkpoint else ())


def test_a_finished_run_has_nothing_left_to_do(folder, world):
    (folder / METRICS.name).write_text("{}")
    for flags in (
        {"output_dir": str(folder), "resume_from_checkpoint": "auto"},
        {"resume_from_checkpoint": str(folder)},
    ):
        with pytest.raises(AlreadyFinished, match="has finished; nothing is left to do"):
            find_resume("ddp_loop", Settings(**flags), world)


# ---- which checkpoint ------------------------------------------------------------------------------------------------


def search(settings: Settings, *launchers: str, path_name: str = "ddp_loop") -> tuple[Path | None, Path | None]:
    """Call `find_checkpoint` and release its lock, as the end of the process would."""
    found = find_checkpoint(path_name, settings, launchers, warn=lambda line: None)
    if found.lock is not None:
        with pytest.raises(UserError, match="has not ended"):
            lock(found.folder)
        os.close(found.lock)
    return found.folder, found.checkpoint


def test_auto_continues_the_run_in_the_folder_or_starts_there(folder, tmp_path, monkeypatch):
    settings = Settings(output_dir=str(folder), resume_from_checkpoint="auto")
    assert search(settings) == (folder, folder / CHECKPOINTS / "checkpoint-4")
    settings = Settings(output_dir=str(tmp_path / "new"), resume_from_checkpoint="auto")
    assert search(settings) == (None, None)
    monkeypatch.chdir(tmp_path)
    assert search(Settings(resume_from_checkpoint="auto")) == (None, None)
    Path("runs/ddp_loop").mkdir(parents=True)
    Path("runs/ddp_loop/latest").symlink_to(folder)
    assert search(Settings(resume_from_checkpoint="auto")) == (folder, folder / CHECKPOINTS / "checkpoint-4")
    (folder / METRICS.name).write_text("{}")
    assert search(Settings(resume_from_checkpoint="auto")) == (None, None), "the latest run has finished"


@pytest.mark.parametrize("content", ['{"path": "/usr/bin", "editor.fontSize": 12}', "", "[]", "not JSON"])
def test_auto_leaves_the_folder_of_another_program_alone(tmp_path, content):
    (tmp_path / SETTINGS.name).write_text(content)
    assert search(Settings(output_dir=str(tmp_path), resume_from_checkpoint="auto")) == (None, None)
    assert [path.name for path in tmp_path.iterdir()] == [SETTINGS.name]


@pytest.mark.parametrize("place", ["", "checkpoints/checkpoint-4"])
@pytest.mark.parametrize("new", [{}, {"output_dir": "new"}])
def test_a_run_is_continued_and_a_checkpoint_starts_a_new_run(folder, place, new):
    for path_name in ("ddp_loop", "trainer_run"):  # either path resumes what the other one has written
        found = search(Settings(resume_from_checkpoint=str(folder / place), **new), path_name=path_name)
        assert found == (folder if not place and not new else None, folder / CHECKPOINTS / "checkpoint-4")


def test_a_restarted_job_resumes_from_the_requested_checkpoint_until_it_has_its_own(folder, tmp_path):
    requested, own = folder / CHECKPOINTS / "checkpoint-4", tmp_path / "new"
    settings = Settings(output_dir=str(own), resume_from_checkpoint=str(requested))
    make_run(own)
    edit_json(own / SETTINGS.name, launchers=["a:1:2.00"])
    assert search(settings, "a:1:2.00") == (own, own / CHECKPOINTS / "checkpoint-4")
    shutil.rmtree(own / CHECKPOINTS)
    assert search(settings, "a:1:2.00") == (own, requested)


@pytest.mark.parametrize("is_restart", [False, True])
def test_a_damaged_checkpoint_is_skipped_and_only_damaged_ones_are_no_reason_to_start_again(folder, capsys, is_restart):
    checkpoints = folder / CHECKPOINTS
    shutil.copytree(checkpoints / "checkpoint-4", checkpoints / "checkpoint-8")
    (checkpoints / "checkpoint-8" / SCHEDULE).write_text("[]")
    edit_json(folder / SETTINGS.name, launchers=["a:1:2.00"])
    settings, lines = Settings(output_dir=str(folder), resume_from_checkpoint=None if is_restart else "auto"), []
    found = find_checkpoint("ddp_loop", settings, ["a:1:2.00"] if is_restart else [], warn=lines.append)
    os.close(found.lock)
    assert found.checkpoint == checkpoints / "checkpoint-4"
    assert lines == [f"{checkpoints / 'checkpoint-8'} is skipped: {SCHEDULE} has changed since it was written"]
    (checkpoints / "checkpoint-4" / SCHEDULE).unlink()
    with pytest.raises(UserError, match=rf"none of its checkpoints can be used: checkpoint-4: {SCHEDULE} is missing"):
        search(settings, *["a:1:2.00"] * is_restart)
    assert len(list(checkpoints.iterdir())) == 3, "nothing is removed"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "no such folder"),
        ("empty", "has no complete checkpoint"),
        ("checkpoint-good", "only checkpoint-<step>, under the name that it was written with"),
        ("run/checkpoints/best-2", "only checkpoint-<step>, under the name that it was written with"),
        ("run", "another version of this program wrote it: resume it with that version"),
        ("run/checkpoints/checkpoint-4", "another version of this program wrote it: resume it with that version"),
    ],
)
def test_what_is_no_checkpoint_is_named(folder, tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    shutil.copytree(folder / CHECKPOINTS / "checkpoint-4", tmp_path / "checkpoint-good")
    edit_json(folder / CHECKPOINTS / "checkpoint-4" / RUN_STATE, format_version=2)
    with pytest.raises(UserError, match=message):
        search(Settings(resume_from_checkpoint=str(tmp_path / name)))


def test_checkpoints_on_a_disk_that_is_not_mounted_are_no_reason_to_start_again(folder, tmp_path):
    (folder / CHECKPOINTS).rename(tmp_path / "disk")
    (folder / CHECKPOINTS).symlink_to(tmp_path / "disk")
    settings = Settings(resume_from_checkpoint=str(folder))
    assert search(settings)[1] == folder / CHECKPOINTS / "checkpoint-4"
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    with pytest.raises(UserError, match=r"checkpoints: links to .*disk, which does not exist"):
        search(settings)


def test_a_folder_is_locked_before_its_checkpoints_are_looked_up(folder):
    held = lock(folder)
    edit_json(folder / SETTINGS.name, launchers=["a:1:2.00"])
    for settings, launchers in (
        (Settings(output_dir=str(folder), resume_from_checkpoint="auto"), []),
        (Settings(resume_from_checkpoint=str(folder)), []),
        (Settings(output_dir=str(folder)), ["a:1:2.00"]),
    ):
        with pytest.raises(UserError, match="has not ended"):
            search(settings, *launchers)
    os.close(held)
    os.close(lock(folder))


@pytest.mark.parametrize(
    ("launchers", "is_own"), [(["a:1:2.00", "b:7:3.00"], True), (["c:1:2.00"], False), ([], False), (None, False)]
)
def test_a_restarted_job_recognizes_its_folder_by_its_launchers(tmp_path, monkeypatch, launchers, is_own):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs" / "ddp_loop" / "2026-01-01_00-00-00")
    (run.parent / "latest").symlink_to("somewhere-else")
    edit_json(run / SETTINGS.name, launchers=launchers)
    mine = ["b:7:3.00", "d:1:1.00"]
    for place, source in (({}, None), ({"output_dir": str(run)}, None), ({"output_dir": "new"}, run)):
        assert find_run("ddp_loop", Settings(**place), mine, source=source) == (run if is_own else None)
        assert find_run("ddp_loop", Settings(**place), [], source=source) is None
    assert find_run("ddp_loop", Settings(output_dir=str(tmp_path / "missing")), mine, source=None) is None
