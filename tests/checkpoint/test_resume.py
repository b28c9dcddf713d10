"""Which checkpoint a run resumes from, which ones it rejects, what it takes over, and why its results would differ."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.killed_run import (
    CPU,
    FINGERPRINT,
    IDENTITY,
    STEP,
    TOTAL,
    evaluation_line,
    make_run,
    step_line,
    write_checkpoint,
)
from helpers.run_folders import edit_json
from helpers.worlds import fake_world

from app.checkpoint.resume import (
    BEST_WEIGHTS,
    CHOICES,
    MUST_BE_EQUAL,
    ROUNDING,
    WITHOUT_EFFECT,
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
    assert resume(folder).lines_of(EVALUATIONS.name) == [evaluation_line(2)]
    (folder / EVALUATIONS.name).write_text("".join(map(evaluation_line, (2, 4, 5))))
    assert resume(folder).lines_of(EVALUATIONS.name) == [evaluation_line(2), evaluation_line(4)]
    check(resume(folder))


def test_a_run_cannot_become_deterministic_when_it_is_resumed(folder):
    with pytest.raises(UserError, match="deterministic was False and is True"):
        check(resume(folder), deterministic=True)


def test_the_number_of_logical_ranks_cannot_change(tmp_path):
    run = make_run(tmp_path / "run", logical_ranks=4)
    check(resume(run), logical_ranks=4)
    with pytest.raises(UserError, match="logical_ranks was 4 and is 2"):
        check(resume(run), logical_ranks=2)


def test_a_run_cannot_compress_its_gradients_differently_when_it_is_resumed(tmp_path):
    run = make_run(tmp_path / "run", ddp_comm_hook="bf16")
    check(resume(run), ddp_comm_hook="bf16", strategy="zero1", ddp_bucket_cap_mb=1)
    with pytest.raises(UserError, match="ddp_comm_hook was bf16 and is power_sgd"):
        check(resume(run), ddp_comm_hook="power_sgd")


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_what_does_not_affect_the_bits_may_change(folder, strategy):
    check(
        resume(folder),
        strategy=strategy,
        activation_checkpointing=True,
        ddp_bucket_cap_mb=1,
        logging_steps=3,
        save_steps=7,
    )


@pytest.mark.parametrize(
    ("log", "change", "message"),
    [
        (STEPS.name, lambda text: text.replace('"step": 2', '"step: 2'), r"steps\.jsonl: damaged, so the run cannot"),
        (STEPS.name, lambda text: text.replace(step_line(2), "[]\n"), r"steps\.jsonl: damaged"),
        (STEPS.name, lambda text: text.replace('"step": 2', '"step": "x"'), r"steps\.jsonl: damaged"),
        (STEPS.name, lambda text: text.replace(step_line(2), ""), r"steps\.jsonl: lacks steps"),
        (STEPS.name, lambda text: "", r"steps\.jsonl: lacks steps"),
        (EVALUATIONS.name, lambda text: "\0" + text, r"evaluations\.jsonl: damaged"),
    ],
)
def test_a_damaged_log_is_named(folder, log, change, message):
    file = folder / log
    file.write_text(change(file.read_text()))
    with pytest.raises(UserError, match=message):
        check(resume(folder))
    file.unlink()
    if log == STEPS.name:
        with pytest.raises(UserError, match=r"steps\.jsonl: lacks steps"):
            check(resume(folder))


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


def check_content(folder: Path, name: str, config: dict[str, Any] | None = None, **changes: Any) -> None:
    """Check a run of a model at ./moved/away, which is not there any more, against a model with this content."""
    found = resume(folder)
    found.state.update(CONTENT)
    found.state["settings"]["model"] = "./moved/away"
    identity = CONTENT | {"model_config": CONTENT["model_config"] | (config or {})} | changes
    check(found, identity, model=name)


def test_only_the_content_of_a_model_folder_counts(folder):
    check_content(folder, str(folder), {"architectures": ["Bert"], "_name_or_path": "x"})
    with pytest.raises(UserError, match=f"the model's commit was None and is {'a' * 40}"):
        check_content(folder, "org/name", model_commit="a" * 40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {"layers": 3}}, "the model's config has changed: layers$"),
        ({"config": {"heads": 3}}, "has changed: heads$"),
        ({"model_code_sha256": "b"}, "the model's Python code has changed$"),
        ({"tokens_sha256": "b"}, "the tokenizer returns other tokens for the same reviews, or pads differently$"),
    ],
)
def test_changed_content_of_a_model_folder_is_named(folder, change, message):
    with pytest.raises(UserError, match=message):
        check_content(folder, str(folder), **change)


def test_defaults_of_another_version_of_transformers_are_no_change(folder):
    newer = {"transformers_version": "6.0", "heads": 3}
    check_content(folder, str(folder), newer)
    with pytest.raises(UserError, match=r"has changed: layers$"):
        check_content(folder, str(folder), newer | {"layers": 3})


@pytest.fixture
def two_threads():
    """This process works with 2 threads, and gets back the number that it has had."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# ---- what makes a resumed run differ from an uninterrupted one -------------------------------------------------------

SETTINGS_BEFORE = {"gradient_accumulation_steps": 2, "eval_batch_size": 64, "cpu_offload": False}
BEFORE = {"torch": torch.__version__, "transformers": transformers.__version__, "threads": 3, "arithmetic": {}}
BEFORE |= {"settings": SETTINGS_BEFORE}
SAME_ARITHMETIC = {"device": [CPU], "fp32_matmul_precision": ["highest"]}
SAME = {"gradient_accumulation_steps": 2}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_another_strategy_or_number_of_ranks_changes_nothing(strategy, ranks):
    for settings in (SAME, SAME | {"threads": 3}):
        mine = Settings(strategy=strategy, **settings)
        assert changes_since(BEFORE, mine, fake_world(0, ranks), arithmetic=SAME_ARITHMETIC) == ()


def test_a_new_run_has_no_changes():
    settings = Settings(threads=5, gradient_accumulation_steps=4)
    assert changes_since({}, settings, fake_world(), arithmetic=SAME_ARITHMETIC) == ()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"threads": 1}, "threads: 1, was 3"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps: 1, was 2"),
        ({"eval_batch_size": 7}, "eval_batch_size: 7, was 64"),
    ],
)
def test_changes_that_affect_rounding_or_dropout_are_listed(changes, expected):
    settings = Settings(**SAME | changes)
    assert changes_since(BEFORE, settings, fake_world(), arithmetic=SAME_ARITHMETIC) == (expected,)
    for package, version in (("torch", torch.__version__), ("transformers", transformers.__version__)):
        found = changes_since(BEFORE | {package: "1.0"}, Settings(**SAME), fake_world(), arithmetic=SAME_ARITHMETIC)
        assert found == (f"{package}: {version}, was 1.0",)


@pytest.mark.parametrize(("device", "announced"), [("cuda", ("cpu_offload: True, was False",)), ("cpu", ())])
def test_the_optimizer_s_device_changes_rounding_on_gpus(device, announced):
    settings = Settings(strategy="zero3", cpu_offload=True, **SAME)
    assert changes_since(BEFORE, settings, fake_world(device=device), arithmetic=SAME_ARITHMETIC) == announced


@pytest.mark.parametrize(
    ("recorded", "announced"),
    [
        (SAME_ARITHMETIC, ()),
        ({"device": ["A", "B"]}, (f"device: {CPU}, was A, B",)),  # the rest is unknown
        (SAME_ARITHMETIC | {"fp32_matmul_precision": ["high"]}, ("fp32_matmul_precision: highest, was high",)),
        (SAME_ARITHMETIC | {"MKL_CBWR": ["AVX2"]}, ("MKL_CBWR: COMPATIBLE, was AVX2",)),
        (SAME_ARITHMETIC | {"MKL_CBWR": ["unset"]}, ("MKL_CBWR: COMPATIBLE, was unset",)),
    ],
)
def test_other_devices_and_kernels_are_announced(recorded, announced):
    now = SAME_ARITHMETIC | {"MKL_CBWR": ["COMPATIBLE"]}
    assert changes_since(BEFORE | {"arithmetic": recorded}, Settings(**SAME), fake_world(), arithmetic=now) == announced


def test_the_settings_that_need_not_be_equal_are_settings():
    assert {*WITHOUT_EFFECT, *CHOICES, *ROUNDING, *BEST_WEIGHTS} <= Settings().as_dict().keys()
    assert {"seed", "precision", "max_length", "learning_rate", "load_best_model_at_end"} <= set(MUST_BE_EQUAL)


@pytest.mark.parametrize("name", MUST_BE_EQUAL)
def test_a_setting_that_must_be_equal_is_compared(folder, name):
    found = resume(folder)
    found.state["settings"][name] = "another value"
    with pytest.raises(UserError, match=f": {name} was another value and is "):
        check(found)


def test_the_checkpoint_determines_what_is_taken_over(folder, world, two_threads):
    """Rather than settings.json, which a later start in the same folder may have written."""
    checkpoint = folder / CHECKPOINTS / "checkpoint-4"
    state = json.loads((checkpoint / RUN_STATE).read_text())
    state["settings"]["logical_ranks"] = 4
    write_checkpoint(checkpoint, state)
    edit_json(folder / SETTINGS.name, logical_ranks=2, threads=7)
    found = find_resume("ddp_loop", Settings(resume_from_checkpoint=str(folder), threads=1), world)
    os.close(found.lock)
    assert (found.folder, found.checkpoint, found.step) == (folder, checkpoint, STEP)
    assert (found.recorded["logical_ranks"], found.recorded["threads"]) == (4, 3)
    assert found.changes == ("threads: 1, was 3",)


def test_without_a_checkpoint_the_folder_determines_it(folder, world):
    """A restarted job, perhaps on other nodes, begins the same training again."""
    (folder / CHECKPOINTS / "checkpoint-4").rename(folder / CHECKPOINTS / ".checkpoint-4.tmp")
    edit_json(folder / SETTINGS.name, logical_ranks=2, threads=7)
    found = find_resume("ddp_loop", Settings(output_dir=str(folder), resume_from_checkpoint="auto"), world)
    os.close(found.lock)
    assert (found.folder, found.checkpoint, found.step) == (folder, None, 0)
    assert (found.recorded["logical_ranks"], found.recorded["threads"]) == (2, 7)
    assert found.changes == ()


def test_a_finished_run_has_nothing_left_to_do(folder, world):
    (folder / METRICS.name).write_text("{}")
    for place in (
        {"output_dir": str(folder), "resume_from_checkpoint": "auto"},
        {"resume_from_checkpoint": str(folder)},
    ):
        with pytest.raises(AlreadyFinished, match="has finished; nothing is left to do"):
            find_resume("ddp_loop", Settings(**place), world)


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


def test_an_older_checkpoint_is_one_line(folder):
    edit_json(folder / CHECKPOINTS / "checkpoint-4" / RUN_STATE, format_version=2)
    for place in ("", "checkpoints/checkpoint-4"):
        with pytest.raises(UserError, match="another version of this program wrote it: resume it with that version"):
            search(Settings(resume_from_checkpoint=str(folder / place)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "no such folder"),
        ("empty", "has no complete checkpoint"),
        ("checkpoint-good", "only checkpoint-<step>, under the name that it was written with"),
        ("run/checkpoints/best-2", "only checkpoint-<step>, under the name that it was written with"),
    ],
)
def test_what_is_no_checkpoint_is_named(folder, tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    shutil.copytree(folder / CHECKPOINTS / "checkpoint-4", tmp_path / "checkpoint-good")
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
