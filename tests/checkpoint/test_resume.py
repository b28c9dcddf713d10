"""Which checkpoint a run resumes from, and from which it refuses to resume."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.run_folders import edit_json
from helpers.worlds import fake_world

from app.checkpoint import find as search_module
from app.checkpoint import resume as resume_module
from app.checkpoint.find import find_checkpoint, folder_of_this_job, read_run_state
from app.checkpoint.manager import commit_checkpoint
from app.checkpoint.resume import MUST_BE_EQUAL, Resume, changes_since, check_compatible, find_resume, restore_settings
from app.common.errors import UserError
from app.common.machine import device_name
from app.data.sampler import plan_batches
from app.model.identity import ModelIdentity
from app.runs.folder import lock
from app.runs.schema import CHECKPOINTS, EVALUATIONS, METRICS, RUN_STATE, SCHEDULE, SETTINGS, STEPS, checkpoint_files
from app.runs.setting_effects import GROUPS
from app.settings import Settings

CPU = device_name(torch.device("cpu"))
STEP, TOTAL, FINGERPRINT = 4, 9, "f" * 64
RECORDED = {"path": "ddp_loop", "world_size": 1, "csv": "reviews.csv", "train_batch_size": 8}


def ignore(warning: str) -> None:
    pass


@pytest.fixture
def folder(tmp_path) -> Path:
    """A run that was killed after its checkpoint-4, in the middle of writing step 6."""
    return make_run(tmp_path / "run")


def make_run(folder: Path, **settings) -> Path:
    mine = Settings(learning_rate=1e-3, **settings).as_dict()
    state = {"path": "ddp_loop", "step": STEP, "total_steps": TOTAL, "fingerprint": FINGERPRINT, "world_size": 1}
    state |= {"device": CPU, "threads": 3}
    for name, files in (("checkpoint-4", {RUN_STATE: state | {"settings": mine, "best": {"step": 2}}}), ("best-2", {})):
        staging = folder / CHECKPOINTS / ".writing" / name
        staging.mkdir(parents=True)
        for file, content in (files | {"weights": 1}).items():
            (staging / file).write_text(json.dumps(content))
        commit_checkpoint(staging, folder / CHECKPOINTS / name)
    (folder / SETTINGS.name).write_text(json.dumps(RECORDED))
    (folder / STEPS.name).write_text("".join(map(step_line, range(1, 6))) + '{"step": 6, "lo')
    (folder / EVALUATIONS.name).write_text(evaluation_line(2) + evaluation_line(5))
    return folder


def step_line(step: int) -> str:
    numbers = dict.fromkeys(["epoch", "loss", "learning_rate", "examples", "tokens", "padded_tokens", "seconds"], 1.5)
    return json.dumps({"step": step} | numbers) + "\n"


def evaluation_line(step: int) -> str:
    return json.dumps({"step": step, "epoch": 1.0, "rows": "test", "accuracy": 0.5, "loss": 0.7}) + "\n"


def resume(folder: Path) -> Resume:
    checkpoint = folder / CHECKPOINTS / "checkpoint-4"
    return Resume(folder, checkpoint, json.loads((checkpoint / RUN_STATE).read_text()))


def check(folder: Path, **settings) -> None:
    check_compatible(
        resume(folder),
        path_name="ddp_loop",
        settings=Settings(learning_rate=1e-3, **settings),
        fingerprint=FINGERPRINT,
        total_steps=TOTAL,
    )


def test_log_lines_after_the_checkpoint_are_dropped(folder):
    assert resume(folder).lines_of(STEPS.name) == list(map(step_line, range(1, 5)))
    assert resume(folder).lines_of(EVALUATIONS.name) == [evaluation_line(2)]
    (folder / EVALUATIONS.name).write_text("".join(map(evaluation_line, (2, 4, 5))))
    assert resume(folder).lines_of(EVALUATIONS.name) == [evaluation_line(2), evaluation_line(4)]
    assert resume(folder).lines_of(EVALUATIONS.name, before=4) == [evaluation_line(2)]  # that evaluation is repeated
    check(folder)


def test_a_run_cannot_become_deterministic_when_it_is_resumed(folder):
    with pytest.raises(UserError, match="deterministic was False and is True"):
        check(folder, deterministic=True)


def test_a_setting_that_the_checkpoint_does_not_record_had_its_default(folder):
    mine = resume(folder)
    del mine.state["settings"]["deterministic"]
    settings = Settings(learning_rate=1e-3)
    check_compatible(mine, path_name="ddp_loop", settings=settings, fingerprint=FINGERPRINT, total_steps=TOTAL)
    settings.deterministic = True
    with pytest.raises(UserError, match="deterministic was False and is True"):
        check_compatible(mine, path_name="ddp_loop", settings=settings, fingerprint=FINGERPRINT, total_steps=TOTAL)


def test_the_number_of_logical_ranks_cannot_change(tmp_path):
    run = make_run(tmp_path / "run", logical_ranks=4)
    check(run, logical_ranks=4)
    with pytest.raises(UserError, match="logical_ranks was 4 and is 2"):
        check(run, logical_ranks=2)


def test_a_run_cannot_compress_its_gradients_differently_when_it_is_resumed(tmp_path):
    run = make_run(tmp_path / "run", ddp_comm_hook="bf16")
    check(run, ddp_comm_hook="bf16", strategy="zero1", ddp_bucket_cap_mb=1)
    with pytest.raises(UserError, match="ddp_comm_hook was bf16 and is power_sgd"):
        check(run, ddp_comm_hook="power_sgd")


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_what_does_not_affect_the_bits_may_change(folder, strategy):
    check(folder, strategy=strategy, activation_checkpointing=True, ddp_bucket_cap_mb=1, logging_steps=3, save_steps=7)


@pytest.mark.parametrize(
    ("log", "change", "message"),
    [
        (STEPS.name, lambda text: text.replace('"step": 2', '"step: 2'), r"steps\.jsonl, line 2: damaged"),
        (STEPS.name, lambda text: text.replace(step_line(2), "[]\n"), r"steps\.jsonl, line 2: damaged"),
        (STEPS.name, lambda text: text.replace('"step": 2', '"step": "x"'), r"steps\.jsonl, line 2: step is 'x', not"),
        (
            STEPS.name,
            lambda text: text.replace('"step": 2', '"step": 2, "grad_norm": []'),
            r"line 2: grad_norm is '\[\]'",
        ),
        (STEPS.name, lambda text: text.replace(step_line(2), ""), r"steps\.jsonl: lacks steps"),
        (STEPS.name, lambda text: "", r"steps\.jsonl: lacks steps"),
        (EVALUATIONS.name, lambda text: "\0" + text, r"evaluations\.jsonl, line 1: damaged"),
    ],
)
def test_a_damaged_log_is_named(folder, log, change, message):
    file = folder / log
    file.write_text(change(file.read_text()))
    with pytest.raises(UserError, match=message):
        check(folder)


def test_a_missing_log_is_named(folder):
    (folder / STEPS.name).unlink()
    with pytest.raises(UserError, match=r"steps\.jsonl: lacks steps"):
        check(folder)


BEST = {"load_best_model_at_end": True, "validation_size": 0.1, "metric_for_best_model": "loss"}


@pytest.mark.parametrize(
    "change", [{"metric_for_best_model": "f1"}, {"load_best_model_at_end": False}, {"eval_batch_size": 7}]
)
def test_the_criterion_for_the_best_weights_cannot_change(tmp_path, change):
    run = make_run(tmp_path / "run", **BEST)
    check(run, **BEST)
    with pytest.raises(UserError, match=f"{next(iter(change))} was "):
        check(run, **BEST | change)


def test_another_commit_of_the_model_is_refused_and_the_right_one_named(folder):
    found = resume(folder)
    found.state["model_commit"] = "a" * 40

    def check_commit(commit: str) -> None:
        settings, model = Settings(learning_rate=1e-3, revision="any"), ModelIdentity(commit)
        check_compatible(
            found, path_name="ddp_loop", settings=settings, fingerprint=FINGERPRINT, total_steps=TOTAL, model=model
        )

    check_commit("a" * 40)
    with pytest.raises(UserError, match=f"add --revision {'a' * 40}"):
        check_commit("b" * 40)


CONTENT = {"model_commit": None, "model_config": {"layers": 2, "architectures": None, "transformers_version": "5.0"}}
CONTENT |= {"model_code_sha256": None, "tokens_sha256": "a"}


def check_content(folder: Path, name: str, config: dict[str, Any] | None = None, **changes: Any) -> None:
    """Check a run of a model at ./moved/away, which is not there any more, against a model with this content."""
    found = resume(folder)
    found.state.update(CONTENT)
    found.state["settings"]["model"] = "./moved/away"
    model = ModelIdentity(**{"config": CONTENT["model_config"] | (config or {}), "tokens": "a"} | changes)
    check_compatible(
        found,
        path_name="ddp_loop",
        settings=Settings(learning_rate=1e-3, model=name),
        fingerprint=FINGERPRINT,
        total_steps=TOTAL,
        model=model,
    )


def test_only_the_content_of_a_model_folder_counts(folder):
    check_content(folder, str(folder), {"architectures": ["Bert"], "_name_or_path": "x"})
    with pytest.raises(UserError, match=r"model was \./moved/away and is tiny$"):
        check_content(folder, "tiny", {"layers": 3})
    with pytest.raises(UserError, match=r"model was \./moved/away and is org/name; .*commit was None"):
        check_content(folder, "org/name", commit="a" * 40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {"layers": 3}}, r"config.json of --model \S+ has changed: layers was 2 and is 3$"),
        ({"config": {"heads": 3}}, "heads was None and is 3$"),
        ({"code": "b"}, r"the Python code of --model \S+ has changed$"),
        ({"tokens": "b"}, r"the tokenizer of --model \S+ returns other tokens for the same reviews"),
    ],
)
def test_changed_content_of_a_model_folder_is_named(folder, change, message):
    with pytest.raises(UserError, match=message):
        check_content(folder, str(folder), **change)


def test_defaults_of_another_version_of_transformers_are_no_change(folder):
    newer = {"transformers_version": "6.0", "heads": 3}
    check_content(folder, str(folder), newer)
    with pytest.raises(UserError, match=r"layers was 2 and is 3$"):
        check_content(folder, str(folder), newer | {"layers": 3})


def test_damaged_best_weights_are_reported_before_the_training_resumes(tmp_path):
    run = make_run(tmp_path / "run", **BEST)
    (run / CHECKPOINTS / "best-2" / "weights").write_text("2")
    with pytest.raises(UserError, match="best-2, the best weights before it: weights has changed since it was written"):
        check(run, **BEST)


@pytest.fixture
def search():
    """Call `find_checkpoint` and release its lock, as the end of the process would."""
    locks = []

    def call(settings: Settings, own: Path | None = None):
        found = find_checkpoint("ddp_loop", settings, own=own, warn=ignore)
        locks.append(found.lock)
        if found.lock is not None:
            with pytest.raises(UserError, match="has not ended"):
                lock(found.folder)
            os.close(found.lock)
        return found.folder, found.checkpoint, found.finished

    return call


def test_auto_resumes_in_the_requested_folder_or_starts_there(folder, tmp_path, search):
    settings = Settings(output_dir=str(folder), resume_from_checkpoint="auto")
    assert search(settings) == (folder, folder / CHECKPOINTS / "checkpoint-4", False)
    settings = Settings(output_dir=str(tmp_path / "new"), resume_from_checkpoint="auto")
    assert search(settings) == (None, None, False)


@pytest.mark.parametrize(
    "content", ['{"path": "/usr/bin", "editor.fontSize": 12}', json.dumps(RECORDED | {"world_size": "1"})]
)
def test_auto_leaves_the_folder_of_another_program_alone(tmp_path, search, content):
    (tmp_path / SETTINGS.name).write_text(content)
    assert search(Settings(output_dir=str(tmp_path), resume_from_checkpoint="auto")) == (None, None, False)
    assert [path.name for path in tmp_path.iterdir()] == [SETTINGS.name]


@pytest.mark.parametrize("content", [None, "", '{"path": "ddp', "[]"])
def test_auto_does_not_start_again_beside_checkpoints_whose_settings_are_lost(folder, monkeypatch, content):
    (folder / SETTINGS.name).unlink()
    if content is not None:
        (folder / SETTINGS.name).write_text(content)
    monkeypatch.setattr(search_module, "RUNS", folder.parent)
    monkeypatch.setattr(search_module, "LATEST", folder.name)
    (folder.parent / "ddp_loop").symlink_to(".")
    for settings in ({"output_dir": str(folder)}, {}):
        with pytest.raises(
            UserError, match=r"run: has checkpoints, but its settings\.json is missing or cannot be read"
        ):
            find_checkpoint("ddp_loop", Settings(resume_from_checkpoint="auto", **settings), own=None, warn=ignore)


def test_auto_does_not_take_a_run_that_is_gone_for_none(tmp_path, monkeypatch, search):
    monkeypatch.chdir(tmp_path)
    Path("runs/ddp_loop").mkdir(parents=True)
    assert search(Settings(resume_from_checkpoint="auto")) == (None, None, False)
    Path("runs/ddp_loop/latest").symlink_to("2026")
    with pytest.raises(UserError, match="runs/ddp_loop/latest: links to 2026, which does not exist: name the run"):
        search(Settings(resume_from_checkpoint="auto"))


def test_auto_refuses_the_folder_of_the_other_training_path(folder, search):
    with pytest.raises(UserError, match="holds a run of ddp_loop: name another folder"):
        find_checkpoint(
            "trainer_run", Settings(output_dir=str(folder), resume_from_checkpoint="auto"), own=None, warn=ignore
        )


def test_a_run_folder_may_be_named_like_a_checkpoint(folder, search):
    renamed = folder.rename(folder.with_name("checkpoint-old"))
    checkpoint = renamed / CHECKPOINTS / "checkpoint-4"
    assert search(Settings(resume_from_checkpoint=str(renamed))) == (renamed, checkpoint, False)


@pytest.mark.parametrize("is_restart", [False, True])
def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_again(folder, is_restart):
    """Starting again would remove them, and the cause may be temporary, such as a disk that fails for a moment."""
    weights = folder / CHECKPOINTS / "checkpoint-4" / "weights"
    weights.write_text("2")
    settings = Settings(output_dir=str(folder), resume_from_checkpoint="auto")
    with pytest.raises(UserError, match="none of its checkpoints can be read"):
        find_checkpoint("ddp_loop", settings, own=folder if is_restart else None, warn=ignore)
    assert weights.read_text() == "2"


@pytest.mark.parametrize("marker", [None, "", "5d41"])
def test_a_run_that_was_killed_before_its_first_checkpoint_was_complete_starts_again(folder, search, marker):
    path = folder / CHECKPOINTS / "checkpoint-4" / "COMPLETE"
    if marker is None:
        path.unlink()
    else:
        path.write_text(marker)
    settings = Settings(output_dir=str(folder), resume_from_checkpoint="auto")
    assert search(settings) == (folder, None, False)


def test_a_run_that_starts_again_says_so(folder):
    (folder / CHECKPOINTS / "checkpoint-4" / "COMPLETE").write_text("")
    settings, lines = Settings(output_dir=str(folder), resume_from_checkpoint="auto"), []
    os.close(find_checkpoint("ddp_loop", settings, own=None, warn=lines.append).lock)
    assert "checkpoint-4 is skipped: COMPLETE has 0 bytes, not 64" in lines[0]
    assert lines[1:] == [f"{folder} has no complete checkpoint, so training starts from the beginning"]


@pytest.mark.parametrize("is_restart", [False, True])
def test_a_kill_leaves_at_most_one_checkpoint_without_a_marker(folder, is_restart):
    """Several have been damaged otherwise, and their other files may be intact."""
    shutil.copytree(folder / CHECKPOINTS / "checkpoint-4", folder / CHECKPOINTS / "checkpoint-8")
    for name in ("checkpoint-4", "checkpoint-8"):
        (folder / CHECKPOINTS / name / "COMPLETE").write_text("")
    before = sorted((folder / CHECKPOINTS).rglob("*"))
    settings = Settings(output_dir=str(folder), resume_from_checkpoint="auto")
    with pytest.raises(UserError, match="none of its checkpoints can be read"):
        find_checkpoint("ddp_loop", settings, own=folder if is_restart else None, warn=ignore)
    assert sorted((folder / CHECKPOINTS).rglob("*")) == before


@pytest.mark.parametrize(
    "settings",
    [
        {"output_dir": "run", "resume_from_checkpoint": "auto"},
        *({"resume_from_checkpoint": path} for path in ("run", "run/checkpoints/checkpoint-4", "disk/checkpoint-4")),
    ],
)
def test_the_checkpoints_may_be_on_another_disk(folder, tmp_path, monkeypatch, search, settings):
    monkeypatch.chdir(tmp_path)
    (folder / CHECKPOINTS).rename(tmp_path / "disk")
    (folder / CHECKPOINTS).symlink_to(tmp_path / "disk")
    if settings["resume_from_checkpoint"].startswith("disk"):
        with pytest.raises(UserError, match="disk/checkpoint-4: is not inside a run folder"):
            search(Settings(**settings))
        return
    run, checkpoint, _ = search(Settings(**settings))
    assert (run, checkpoint.absolute()) == (folder, folder / CHECKPOINTS / "checkpoint-4")
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    with pytest.raises(UserError, match="checkpoint"):
        search(Settings(**settings))


def test_a_link_to_a_checkpoint_or_to_a_run_is_followed(folder, tmp_path, search):
    (tmp_path / "latest").symlink_to(folder)
    (tmp_path / "checkpoint-good").symlink_to(folder / CHECKPOINTS / "checkpoint-4")
    for name in ("latest", "latest/checkpoints/checkpoint-4", "checkpoint-good"):
        found = search(Settings(resume_from_checkpoint=str(tmp_path / name)))
        assert found == (folder, folder / CHECKPOINTS / "checkpoint-4", False)


def test_auto_does_not_overwrite_a_finished_run(folder, search):
    (folder / METRICS.name).write_text("{}")
    (folder / CHECKPOINTS / "checkpoint-4" / "COMPLETE").unlink()
    settings = Settings(output_dir=str(folder), resume_from_checkpoint="auto")
    with pytest.raises(UserError, match="holds a finished run"):
        search(settings)


def test_a_checkpoint_outside_a_run_folder_is_refused(folder, tmp_path, search):
    (tmp_path / "other").mkdir()
    alone = (folder / CHECKPOINTS / "checkpoint-4").rename(tmp_path / "other" / "checkpoint-4")
    with pytest.raises(UserError, match="is not inside a run folder"):
        search(Settings(resume_from_checkpoint=str(alone)))
    with pytest.raises(UserError, match="no such folder"):
        search(Settings(resume_from_checkpoint=str(tmp_path / "nowhere" / "checkpoint-4")))
    with pytest.raises(UserError, match="other: is a folder of checkpoints: name one of them, or the run's folder"):
        search(Settings(resume_from_checkpoint=str(tmp_path / "other")))


@pytest.mark.parametrize("place", ["", "checkpoints/checkpoint-4"])
def test_a_run_is_resumed_in_its_own_folder_unless_another_is_named(folder, tmp_path, search, place):
    checkpoint = folder / CHECKPOINTS / "checkpoint-4"
    settings = Settings(resume_from_checkpoint=str(folder / place))
    assert search(settings) == (folder, checkpoint, False)
    settings = Settings(resume_from_checkpoint=str(folder / place), output_dir=str(tmp_path / "new"))
    assert search(settings) == (None, checkpoint, False)


def test_a_restarted_job_resumes_from_the_requested_checkpoint_until_it_has_its_own(folder, tmp_path, search):
    requested = folder / CHECKPOINTS / "checkpoint-4"
    settings = Settings(output_dir=str(tmp_path / "new"), resume_from_checkpoint=str(requested))
    own = tmp_path / "new"
    own.mkdir()
    assert search(settings, own) == (own, requested, False)
    make_run(own)
    assert search(settings, own) == (own, own / CHECKPOINTS / "checkpoint-4", False)


def test_a_restarted_job_whose_run_is_complete_has_nothing_left_to_do(folder, search):
    (folder / METRICS.name).write_text("{}")
    assert search(Settings(output_dir=str(folder)), folder) == (folder, None, True)


def test_checkpoints_are_looked_up_only_while_the_folder_is_locked(folder, monkeypatch):
    """Otherwise another job could write or remove checkpoints after they were found."""
    unlocked = []

    def record_if_unlocked(checkpoints, warn):
        try:
            os.close(lock(checkpoints.parent))
            unlocked.append(checkpoints)
        except UserError:
            pass
        return checkpoints / "checkpoint-4"

    monkeypatch.setattr(search_module, "latest_valid_checkpoint", record_if_unlocked)
    for settings, own in (
        (Settings(output_dir=str(folder), resume_from_checkpoint="auto"), None),
        (Settings(resume_from_checkpoint=str(folder)), None),
        (Settings(output_dir=str(folder)), folder),
    ):
        found = find_checkpoint("ddp_loop", settings, own=own, warn=ignore)
        os.close(found.lock)
    assert unlocked == []
    held = lock(folder)
    for settings, own in (
        (Settings(output_dir=str(folder), resume_from_checkpoint="auto"), None),
        (Settings(resume_from_checkpoint=str(folder / CHECKPOINTS / "checkpoint-4")), None),
    ):
        with pytest.raises(UserError, match="has not ended"):
            find_checkpoint("ddp_loop", settings, own=own, warn=ignore)
    os.close(held)


@pytest.mark.parametrize(
    ("content", "is_own"),
    [
        ('{"launchers": ["a:1:2.00", "b:7:3.00"]}', True),
        ('{"launchers": ["c:1:2.00"]}', False),
        ('{"launchers": []}', False),
        ("{}", False),
        ("[]", False),
        ('{"launchers": "b:7:3.00"}', False),
        ('{"launchers": [["b:7:3.00"], null]}', False),
        ("not JSON", False),
        pytest.param("[" * 100_000, False, id="nested too deeply"),
    ],
)
def test_a_restarted_job_recognizes_its_folder_by_its_launchers(tmp_path, monkeypatch, content, is_own):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "ddp_loop" / "2026-01-01_00-00-00"
    run.mkdir(parents=True)
    (run.parent / "latest").symlink_to("somewhere-else")
    (run / SETTINGS.name).write_text(content.replace("{", json.dumps(RECORDED)[:-1] + ", ", 1).replace(", }", "}"))
    launchers = ["b:7:3.00", "d:1:1.00"]
    elsewhere = run.rename(tmp_path / "elsewhere")
    assert folder_of_this_job("ddp_loop", Settings(), launchers) is None
    for place in ("", "checkpoints/checkpoint-10"):  # which may have been removed meanwhile
        resumed = Settings(resume_from_checkpoint=str(elsewhere / place))
        assert folder_of_this_job("ddp_loop", resumed, launchers) == (elsewhere if is_own else None)
        new = Settings(resume_from_checkpoint=str(elsewhere / place), output_dir=str(tmp_path / "missing"))
        assert folder_of_this_job("ddp_loop", new, launchers) is None
    elsewhere.rename(run)
    for settings in (Settings(), Settings(resume_from_checkpoint="auto"), Settings(output_dir=str(run))):
        assert folder_of_this_job("ddp_loop", settings, launchers) == (run if is_own else None)
    assert folder_of_this_job("ddp_loop", Settings(output_dir=str(tmp_path / "missing")), launchers) is None
    assert folder_of_this_job("ddp_loop", Settings(output_dir=str(run)), []) is None


@pytest.mark.parametrize(
    ("world_size", "files", "missing"),
    [
        (1, ["model.safetensors", "optimizer.safetensors", "random_states.safetensors", SCHEDULE], "state-0-of-1"),
        (2, ["state-0-of-1.safetensors", SCHEDULE], "state-0-of-2"),
        (2, ["state-0-of-2.safetensors", SCHEDULE], "state-1-of-2"),
        (1, ["state-0-of-1.safetensors"], SCHEDULE),
    ],
)
def test_a_checkpoint_of_an_earlier_version_is_refused_in_one_line(folder, world_size, files, missing):
    checkpoint = folder / CHECKPOINTS / "checkpoint-4"
    edit_json(checkpoint / RUN_STATE, world_size=world_size)
    for name in files:
        (checkpoint / name).touch()
    with pytest.raises(UserError, match=rf"checkpoint-4: has no {re.escape(missing)}.*: an earlier version") as caught:
        read_run_state(checkpoint)
    assert len(str(caught.value).splitlines()) == 1
    for name in checkpoint_files(world_size):
        (checkpoint / name).touch()
    assert read_run_state(checkpoint)["step"] == STEP


def test_a_folder_is_locked_until_its_job_has_ended(tmp_path):
    held = lock(tmp_path)
    with pytest.raises(UserError, match="has not ended"):
        lock(tmp_path)
    os.close(held)
    os.close(lock(tmp_path))


# ---- what a resumed run takes over -----------------------------------------------------------------------------------


@pytest.fixture
def two_threads():
    """This process works with 2 threads, and gets back the number that it has had."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def all_with_two_threads(two_threads, monkeypatch):
    """All ranks start with 2 threads, except for one with 5."""
    monkeypatch.setattr(resume_module, "all_gather_object", lambda mine, world: [5, *[mine] * world.size])


def recorded(**changes: Any) -> Resume:
    """A run on 2 ranks with 3 threads each."""
    return Resume(recorded={"logical_ranks": 2, "threads": 3, "train_batch_size": 32} | changes)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_a_new_run_has_one_logical_rank_per_process(all_with_two_threads, ranks):
    settings = Settings(train_batch_size=48)
    adopted = restore_settings(settings, Resume(), fake_world(0, ranks))
    assert adopted.as_dict() == settings.as_dict() | {"logical_ranks": ranks}
    assert torch.get_num_threads() == 2
    assert plan_batches(adopted, 1_000, ranks) == plan_batches(settings, 1_000, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("logical_ranks", [1, 2, 8])
def test_a_resumed_run_keeps_its_logical_ranks_and_threads(all_with_two_threads, ranks, logical_ranks):
    settings = Settings(train_batch_size=48)
    adopted = restore_settings(settings, recorded(logical_ranks=logical_ranks), fake_world(0, ranks))
    assert adopted.as_dict() == settings.as_dict() | {"logical_ranks": logical_ranks}
    assert torch.get_num_threads() == 3


def test_a_resumed_run_keeps_searching_for_unused_parameters(all_with_two_threads):
    """They follow from the model."""
    before = recorded(ddp_find_unused_parameters=True)
    assert restore_settings(Settings(), before, fake_world()).ddp_find_unused_parameters
    assert not restore_settings(Settings(), recorded(), fake_world()).ddp_find_unused_parameters
    compressed = Settings(ddp_comm_hook="power_sgd")  # refused later, because the run so far was not compressed
    assert not restore_settings(compressed, before, fake_world()).ddp_find_unused_parameters


def test_a_run_on_3_ranks_can_be_resumed_on_3_ranks(all_with_two_threads):
    settings = Settings(train_batch_size=48)
    adopted = restore_settings(settings, recorded(logical_ranks=3), fake_world(0, 3))
    assert plan_batches(adopted, 1_000, 3).logical_ranks == 3
    resumed = restore_settings(settings, recorded(logical_ranks=3), fake_world())
    with pytest.raises(UserError, match=r"3 logical ranks, which are not a power of two, .*: start 3 ranks"):
        plan_batches(resumed, 1_000, 1)


def test_requested_logical_ranks_and_threads_are_kept(all_with_two_threads):
    adopted = restore_settings(Settings(logical_ranks=8, threads=2), recorded(), fake_world(0, 2))
    assert (adopted.logical_ranks, adopted.threads) == (8, 2)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_batch_size_per_rank_keeps_the_global_one_if_the_number_of_ranks_changes(all_with_two_threads, ranks):
    """It was 16 rows on each of 2 ranks."""
    before = recorded(per_device_train_batch_size=16, logical_ranks=4)
    adopted = restore_settings(Settings(per_device_train_batch_size=16), before, fake_world(0, ranks))
    plan = plan_batches(adopted, 1_000, ranks)
    assert (plan.global_size, plan.logical_ranks, plan.micro_size) == (32, 4, 8)


def test_another_batch_size_per_rank_is_used_as_given(all_with_two_threads):
    before = recorded(per_device_train_batch_size=16)
    adopted = restore_settings(Settings(per_device_train_batch_size=32), before, fake_world())
    assert plan_batches(adopted, 1_000, 1).global_size == 32, "the same global batch on half as many ranks"
    adopted = restore_settings(Settings(train_batch_size=64), before, fake_world())
    assert plan_batches(adopted, 1_000, 1).global_size == 64
    adopted = restore_settings(Settings(per_device_train_batch_size=16), recorded(), fake_world())
    assert plan_batches(adopted, 1_000, 1).global_size == 16, "the run so far was given a global batch size"


# ---- what makes a resumed run differ from an uninterrupted one -------------------------------------------------------

BEFORE = {
    "device": CPU,
    "torch": torch.__version__,
    "threads": 3,
    "world_size": 2,
    "settings": {"gradient_accumulation_steps": 2, "eval_batch_size": 64},
}
SAME_ARITHMETIC = {"device": [CPU], "fp32_matmul_precision": ["highest"]}
SAME = {"gradient_accumulation_steps": 2}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_another_strategy_or_number_of_ranks_changes_nothing(strategy, ranks):
    assert (
        changes_since(BEFORE, Settings(strategy=strategy, **SAME), fake_world(0, ranks), arithmetic=SAME_ARITHMETIC)
        == ()
    )
    assert (
        changes_since(
            BEFORE, Settings(strategy=strategy, threads=3, **SAME), fake_world(0, ranks), arithmetic=SAME_ARITHMETIC
        )
        == ()
    )


def test_a_new_run_has_no_changes():
    assert (
        changes_since({}, Settings(threads=5, gradient_accumulation_steps=4), fake_world(), arithmetic=SAME_ARITHMETIC)
        == ()
    )


@pytest.mark.parametrize(
    ("changes", "device", "expected"),
    [
        ({"threads": 1}, "cpu", ("threads per rank: 1, was 3",)),
        ({"gradient_accumulation_steps": 1}, "cpu", ("accumulation steps: 1, was 2",)),
        ({"eval_batch_size": 7}, "cpu", ("evaluation batch size: 7, was 64",)),
        ({}, "cuda:0", ("device: GPU, was CPU",)),
        ({"threads": 4, "gradient_accumulation_steps": 4}, "cuda:1", None),
    ],
)
def test_changes_that_affect_rounding_or_dropout_are_listed(monkeypatch, changes, device, expected):
    monkeypatch.setattr(resume_module, "device_name", lambda device: "CPU" if device.type == "cpu" else "GPU")
    before = BEFORE | {"device": "CPU"}
    found = changes_since(before, Settings(**SAME | changes), fake_world(device=device), arithmetic=SAME_ARITHMETIC)
    if expected is None:
        expected = ("device: GPU, was CPU", "accumulation steps: 4, was 2", "threads per rank: 4, was 3")
    assert found == expected
    found = changes_since(before | {"device": "GPU"}, Settings(**SAME), fake_world(), arithmetic=SAME_ARITHMETIC)
    assert found == ("device: CPU, was GPU",)
    for package, version in (("torch", torch.__version__), ("transformers", transformers.__version__)):
        found = changes_since(before | {package: "1.0"}, Settings(**SAME), fake_world(), arithmetic=SAME_ARITHMETIC)
        assert found == (f"{package}: {version}, was 1.0",)


@pytest.mark.parametrize(("device", "announced"), [("cuda", ("optimizer on the CPU: True, was False",)), ("cpu", ())])
def test_the_optimizer_s_device_changes_rounding_on_gpus(monkeypatch, device, announced):
    monkeypatch.setattr(resume_module, "device_name", lambda device: BEFORE["device"])
    before = BEFORE | {"settings": SAME | {"cpu_offload": False}}
    settings = Settings(strategy="zero3", cpu_offload=True, **SAME)
    assert changes_since(before, settings, fake_world(device=device), arithmetic=SAME_ARITHMETIC) == announced


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


def test_every_setting_has_an_effect_that_resuming_and_comparing_follow():
    """A new setting fails this test until it is decided what another value of it changes."""
    assert sorted(name for group in GROUPS for name in group) == sorted(Settings().as_dict())


def test_a_checkpoint_of_a_version_that_recorded_bf16_is_resumed(folder):
    """Earlier versions recorded it beside precision."""
    file = folder / CHECKPOINTS / "checkpoint-4" / RUN_STATE
    state = json.loads(file.read_text())
    state["settings"] |= {"precision": "bf16", "bf16": True}
    file.write_text(json.dumps(state))
    check_compatible(
        resume(folder),
        path_name="ddp_loop",
        settings=Settings(learning_rate=1e-3, precision="bf16"),
        fingerprint=FINGERPRINT,
        total_steps=TOTAL,
    )
    with pytest.raises(UserError, match="precision was bf16 and is fp32"):
        check_compatible(
            resume(folder),
            path_name="ddp_loop",
            settings=Settings(learning_rate=1e-3),
            fingerprint=FINGERPRINT,
            total_steps=TOTAL,
        )


@pytest.mark.parametrize("name", MUST_BE_EQUAL)
def test_a_setting_that_must_be_equal_is_compared(folder, name):
    found = resume(folder)
    found.state["settings"][name] = "another value"
    with pytest.raises(UserError, match=f": {name} was another value and is "):
        check_compatible(
            found,
            path_name="ddp_loop",
            settings=Settings(learning_rate=1e-3),
            fingerprint=FINGERPRINT,
            total_steps=TOTAL,
        )


def test_the_checkpoint_determines_what_is_taken_over(folder, world, two_threads):
    """Rather than settings.json, which a later start in the same folder may have written."""
    checkpoint = folder / CHECKPOINTS / "checkpoint-4"
    state = json.loads((checkpoint / RUN_STATE).read_text())
    state["settings"]["logical_ranks"] = 4
    rewrite(checkpoint, state)
    edit_json(folder / SETTINGS.name, logical_ranks=2, threads=7)
    found = find_resume("ddp_loop", Settings(resume_from_checkpoint=str(folder), threads=1), world)
    os.close(found.lock)
    assert (found.folder, found.checkpoint, found.step) == (folder, checkpoint, STEP)
    assert (found.recorded["logical_ranks"], found.recorded["threads"]) == (4, 3)
    assert found.changes == ("threads per rank: 1, was 3",)


def test_without_a_checkpoint_the_folder_determines_it(folder, world):
    """A restarted job, perhaps on other nodes, begins the same training again."""
    (folder / CHECKPOINTS / "checkpoint-4" / "COMPLETE").unlink()
    edit_json(folder / SETTINGS.name, logical_ranks=2, threads=7)
    found = find_resume("ddp_loop", Settings(output_dir=str(folder), resume_from_checkpoint="auto"), world)
    os.close(found.lock)
    assert (found.folder, found.checkpoint, found.step) == (folder, None, 0)
    assert (found.recorded["logical_ranks"], found.recorded["threads"]) == (2, 7)
    assert found.changes == ()


def rewrite(checkpoint: Path, state: dict[str, Any]) -> None:
    """Replace a checkpoint by a complete one with this run_state.json."""
    staging = checkpoint.parent / ".writing" / checkpoint.name
    staging.mkdir(parents=True)
    for name in checkpoint_files(state["world_size"]):
        (staging / name).write_text(json.dumps(state) if name == RUN_STATE else name)
    commit_checkpoint(staging, checkpoint)
