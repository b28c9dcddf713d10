"""Which checkpoints a run refuses to resume from, what it takes over, and why its results would differ."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.killed_run import CPU, FINGERPRINT, STEP, TOTAL, evaluation_line, make_run, step_line
from helpers.run_folders import edit_json
from helpers.worlds import fake_world

from app.checkpoint import resume as resume_module
from app.checkpoint.manager import commit_checkpoint
from app.checkpoint.resume import MUST_BE_EQUAL, Resume, changes_since, check_compatible, find_resume, restore_settings
from app.common.errors import UserError
from app.data.sampler import plan_batches
from app.model.identity import ModelIdentity
from app.runs.schema import CHECKPOINTS, EVALUATIONS, RUN_STATE, SETTINGS, STEPS, checkpoint_files
from app.runs.setting_effects import GROUPS
from app.settings import Settings


def resume(folder: Path) -> Resume:
    checkpoint = folder / CHECKPOINTS / "checkpoint-4"
    return Resume(folder, checkpoint, json.loads((checkpoint / RUN_STATE).read_text()))


def check(found: Resume, identity: ModelIdentity = ModelIdentity(), /, **settings: Any) -> None:  # noqa: B008
    check_compatible(
        found,
        path_name="ddp_loop",
        settings=Settings(learning_rate=1e-3, max_length=256, num_train_epochs=6, **settings),
        fingerprint=FINGERPRINT,
        total_steps=TOTAL,
        model=identity,
    )


def test_log_lines_after_the_checkpoint_are_dropped(folder):
    assert resume(folder).lines_of(STEPS.name) == list(map(step_line, range(1, 5)))
    assert resume(folder).lines_of(EVALUATIONS.name) == [evaluation_line(2)]
    (folder / EVALUATIONS.name).write_text("".join(map(evaluation_line, (2, 4, 5))))
    assert resume(folder).lines_of(EVALUATIONS.name) == [evaluation_line(2), evaluation_line(4)]
    assert resume(folder).lines_of(EVALUATIONS.name, before=4) == [evaluation_line(2)]  # that evaluation is repeated
    check(resume(folder))


def test_a_run_cannot_become_deterministic_when_it_is_resumed(folder):
    with pytest.raises(UserError, match="deterministic was False and is True"):
        check(resume(folder), deterministic=True)


def test_a_setting_that_the_checkpoint_does_not_record_had_its_default(folder):
    mine = resume(folder)
    del mine.state["settings"]["deterministic"]
    check(mine)
    with pytest.raises(UserError, match="deterministic was False and is True"):
        check(mine, deterministic=True)


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
        check(resume(folder))


def test_a_missing_log_is_named(folder):
    (folder / STEPS.name).unlink()
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


def test_another_commit_of_the_model_is_refused_and_the_right_one_named(folder):
    found = resume(folder)
    found.state["model_commit"] = "a" * 40
    check(found, ModelIdentity("a" * 40), revision="any")
    with pytest.raises(UserError, match=f"add --revision {'a' * 40}"):
        check(found, ModelIdentity("b" * 40), revision="any")


CONTENT = {"model_commit": None, "model_config": {"layers": 2, "architectures": None, "transformers_version": "5.0"}}
CONTENT |= {"model_code_sha256": None, "tokens_sha256": "a"}


def check_content(folder: Path, name: str, config: dict[str, Any] | None = None, **changes: Any) -> None:
    """Check a run of a model at ./moved/away, which is not there any more, against a model with this content."""
    found = resume(folder)
    found.state.update(CONTENT)
    found.state["settings"]["model"] = "./moved/away"
    model = ModelIdentity(**{"config": CONTENT["model_config"] | (config or {}), "tokens": "a"} | changes)
    check(found, model, model=name)


def test_only_the_content_of_a_model_folder_counts(folder):
    check_content(folder, str(folder), {"architectures": ["Bert"], "_name_or_path": "x"})
    with pytest.raises(UserError, match=r"model was \./moved/away and is tiny$"):
        check_content(folder, "tiny", {"layers": 3})
    with pytest.raises(UserError, match=r"model was \./moved/away and is org/name; .*commit was None"):
        check_content(folder, "org/name", commit="a" * 40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {"layers": 3}}, r"config.json of --model \S+ has changed: layers$"),
        ({"config": {"heads": 3}}, "has changed: heads$"),
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
    with pytest.raises(UserError, match=r"has changed: layers$"):
        check_content(folder, str(folder), newer | {"layers": 3})


def test_damaged_best_weights_are_reported_before_the_training_resumes(tmp_path):
    run = make_run(tmp_path / "run", **BEST)
    (run / CHECKPOINTS / "best-2" / "weights").write_text("2")
    with pytest.raises(UserError, match="best-2, the best weights before it: weights has changed since it was written"):
        check(resume(run), **BEST)


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
    for settings in (SAME, SAME | {"threads": 3}):
        mine = Settings(strategy=strategy, **settings)
        assert changes_since(BEFORE, mine, fake_world(0, ranks), arithmetic=SAME_ARITHMETIC) == ()


def test_a_new_run_has_no_changes():
    settings = Settings(threads=5, gradient_accumulation_steps=4)
    assert changes_since({}, settings, fake_world(), arithmetic=SAME_ARITHMETIC) == ()


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
    check(resume(folder), precision="bf16")
    with pytest.raises(UserError, match="precision was bf16 and is fp32"):
        check(resume(folder))


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
