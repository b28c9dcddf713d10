"""Trainer with DeepSpeed or FSDP2 trains what plain DDP trains, up to rounding, with the same files, and resumes.

That a resumed run is bitwise identical is proven in test_resumed_runs.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.architectures import write_model
from helpers.jobs import Outcome, TrainingRun, read_steps, require_deepspeed, require_success, write_subset
from safetensors.torch import load_file
from transformers import pipeline

from app.report.bitwise import first_difference
from app.runs.hashes import hash_run
from app.runs.reader import read_run

pytestmark = [pytest.mark.launched, pytest.mark.slow]
CPU = {"device": "cpu"}
CONFIGS = {
    "stage-1": {"stage": 1},
    "stage-2": {"stage": 2},
    "stage-3": {"stage": 3},
    "stage-2-offload": {"stage": 2, "offload_optimizer": CPU},
    # Small parameters are kept complete on all ranks by default: 0 shards all of them.
    "stage-3-offload": {
        "stage": 3,
        "offload_optimizer": CPU,
        "offload_param": CPU,
        "stage3_param_persistence_threshold": 0,
    },
}
TOLERANCE = 1e-4  # the largest difference of two losses
FLAGS = ["--csv=reviews.csv", "--model=bert", "--max_length=32", "--train_batch_size=16", "--dropout=0.1"]
# 4 steps, two micro-batches for each of 2 logical ranks, and gradients that are clipped.
SHORT = [*FLAGS, "--max_steps=4", "--logical_ranks=2", "--gradient_accumulation_steps=2", "--max_grad_norm=0.3"]
SHORT += ["--save_strategy=steps", "--save_steps=2", "--save_total_limit=9", "--eval_strategy=steps", "--eval_steps=2"]
BEST = ["--validation_size=0.2", "--load_best_model_at_end"]
BF16 = ["--bf16", "--max_steps=2"]
# As in tutorials. Stage 3 begins with a scale that overflows in some steps.
FP16_SECTION = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2}
OVERFLOWS = FP16_SECTION | {"initial_scale_power": 23, "min_loss_scale": 1}
FP16 = ["--precision=fp16", "--max_steps=12", "--save_steps=4"]
LONG = [
    "--csv=more_reviews.csv",
    "--model=tiny",
    "--max_length=16",
    "--train_batch_size=8",
    "--dropout=0.1",
    "--max_steps=40",
]
LONG += ["--save_strategy=no", "--eval_strategy=no"]


def write_inputs(folder: Path, csv: Path) -> None:
    write_subset(csv, folder / "reviews.csv", 121)  # 13 test rows: the ranks have different numbers of them
    write_subset(csv, folder / "more_reviews.csv", 1500)
    for name in ("bert", "xlnet"):  # xlnet has parameters without a gradient
        write_model(folder / name, name)
    for name, zero in CONFIGS.items():
        # Otherwise stage 3 replaces torch.nn.functional.linear, also for the runs that follow it in the same process.
        config = {"zero_optimization": zero | {"memory_efficient_linear": False}}
        (folder / f"{name}.json").write_text(json.dumps(config))
        (folder / f"fp16-{name}.json").write_text(json.dumps(config | {"fp16": FP16_SECTION}))
        (folder / f"overflows-{name}.json").write_text(json.dumps(config | {"fp16": OVERFLOWS}))
    (folder / "other-batch.json").write_text(json.dumps({"train_batch_size": 64, "zero_optimization": {"stage": 1}}))


def ddp(*flags: str) -> TrainingRun:
    return TrainingRun("trainer_run", [*SHORT, *flags])


def with_config(name: str, *flags: str) -> TrainingRun:
    return ddp(*flags, f"--deepspeed={name}.json")


def fsdp(*flags: str) -> TrainingRun:
    return TrainingRun("trainer_run", [*SHORT, "--fsdp", *flags], mutation="cpus_as_gpus")


def resume(name: str, step: int = 2) -> str:
    return f"--resume_from_checkpoint={name}/checkpoints/checkpoint-{step}"


RUNS = {
    "ddp": ddp(),
    **{name: with_config(name) for name in CONFIGS},
    "stage-1-as-3": with_config("stage-3", resume("stage-1")),
    "zero3": ddp("--strategy=zero3"),
    "zero3-as-stage-2": with_config("stage-2", resume("zero3")),
    "zero3-as-stage-3": with_config("stage-3", resume("zero3")),
    "stage-3-as-ddp": ddp(resume("stage-3")),
    "evaluated-only": with_config("stage-3", resume("stage-3", 4)),
    "best-ddp": ddp(*BEST),
    "best-stage-3": with_config("stage-3", *BEST),
    "bf16-ddp": ddp(*BF16),
    "bf16-stage-2": with_config("stage-2", *BF16),
    "fp16-ddp": ddp(*FP16),
    "fp16-stage-1": with_config("fp16-stage-1", *FP16),
    "fp16-stage-2": with_config("fp16-stage-2", *FP16),
    "fp16-stage-3": with_config("fp16-stage-3", *FP16),
    "overflows-3": with_config("overflows-stage-3", *FP16),
    "overflows-3-resumed": with_config("overflows-stage-3", *FP16, resume("overflows-3", 4)),
    "overflows-1": with_config("overflows-stage-1", *FP16),
    "overflows-1-resumed": with_config("overflows-stage-1", *FP16, resume("overflows-1", 4)),
    "overflows-1-as-zero2": ddp(*FP16, "--strategy=zero2", resume("overflows-1", 4)),
    "fsdp": fsdp(),
    "ddp-after": ddp(),
    "long-ddp": TrainingRun("trainer_run", LONG),
    **{f"long-{name}": TrainingRun("trainer_run", [*LONG, f"--deepspeed={name}.json"]) for name in CONFIGS},
}
MISTAKES = {
    "wrong-path": TrainingRun("ddp_loop", [*SHORT, "--deepspeed=stage-1.json"]),
    "contradiction": with_config("other-batch"),
    "no-file": with_config("none"),
    "no-fp16": with_config("fp16-stage-2"),
    "fsdp-on-cpus": ddp("--fsdp"),
    **{f"unused-{n}": with_config(f"stage-{n}", "--model=xlnet") for n in ("1", "2", "3")},
}


NON_FINITE = {"non-finite": with_config("stage-2", "--learning_rate=1e30", "--eval_strategy=no")}
SHARED_RUNS = {"engines": RUNS | MISTAKES | NON_FINITE}


@pytest.fixture(scope="module")
def outcomes(trained_by) -> dict[str, Outcome]:
    require_deepspeed()
    return trained_by("engines")


@pytest.fixture(scope="module")
def folder(outcomes, shared_folder) -> Path:
    """The folder of all runs, which 2 ranks train in one job."""
    require_success({name: outcome for name, outcome in outcomes.items() if name not in MISTAKES | NON_FINITE})
    return shared_folder


@pytest.fixture(params=CONFIGS)
def engine(request, folder) -> tuple[Path, Path]:
    """The folders of a run with each configuration and of a run with plain DDP."""
    return folder / request.param, folder / "ddp"


def largest_difference(a: Path, b: Path, key: str = "loss") -> float:
    steps, others = read_steps(a), read_steps(b)
    assert len(steps) == len(others) > 0
    return max(abs(one[key] - other[key]) for one, other in zip(steps, others, strict=True))


def read_settings(run: Path) -> dict[str, Any]:
    return json.loads((run / "settings.json").read_text())


def test_losses_gradient_norms_and_rows_are_those_of_ddp(engine):
    run, plain = engine
    assert largest_difference(run, plain) < TOLERANCE
    assert largest_difference(run, plain, "grad_norm") < TOLERANCE
    a, b = read_run(run), read_run(plain)
    assert (a.predictions["row"] == b.predictions["row"]).all()
    assert a.metrics["loss"] == pytest.approx(b.metrics["loss"], abs=TOLERANCE)


def test_the_engine_is_deepspeeds_and_recorded(engine):
    run, plain = engine
    config = read_settings(run)["deepspeed_config"]
    assert config["zero_optimization"] == CONFIGS[run.name] | {"memory_efficient_linear": False}
    assert config["gradient_accumulation_steps"] == 2
    assert read_settings(run)["wrapper"] == "DeepSpeedEngine"
    assert read_settings(plain)["wrapper"] == "DistributedDataParallel"
    assert read_settings(plain)["deepspeed_config"] is None


def test_the_model_is_complete_and_loads_with_pipeline(engine):
    weights, expected = (load_file(run / "model" / "model.safetensors") for run in engine)
    assert {name: tensor.shape for name, tensor in weights.items()} == {n: t.shape for n, t in expected.items()}
    assert all((tensor - expected[name]).abs().max() < 1e-3 for name, tensor in weights.items())
    assert len(pipeline("text-classification", model=str(engine[0] / "model"))(["很好", "很差"])) == 2


@pytest.mark.parametrize("name", ["stage-1-as-3", "stage-3-as-ddp", "zero3-as-stage-2", "zero3-as-stage-3"])
def test_a_run_resumes_with_another_stage_or_without_deepspeed(folder, outcomes, name):
    assert largest_difference(folder / name, folder / "ddp") < TOLERANCE
    assert largest_difference(folder / name, folder / "ddp", "grad_norm") < TOLERANCE
    announcements = {
        "stage-1-as-3": "zero_optimization.stage: 3, was 1",
        "stage-3-as-ddp": "engine: PyTorch, was DeepSpeed",
    }
    announcements |= dict.fromkeys(("zero3-as-stage-2", "zero3-as-stage-3"), "engine: DeepSpeed, was PyTorch")
    assert announcements[name] in outcomes[name].out
    assert "not bitwise identical to an uninterrupted run" in outcomes[name].out


def test_a_mistake_is_one_line_that_names_what_to_change(folder, outcomes):
    mistakes = {name: outcomes[name].problem for name in MISTAKES}
    assert "only app.trainer_run has it" in mistakes["wrong-path"]
    assert 'train_batch_size is 64, not 16 as set: remove it or set "auto"' in mistakes["contradiction"]
    assert "--deepspeed fp16-stage-2.json: fp16.enabled is true: add --precision fp16, or remove" in mistakes["no-fp16"]
    assert "--deepspeed none.json: No such file or directory" in mistakes["no-file"]
    assert "--fsdp needs GPUs" in mistakes["fsdp-on-cpus"]
    assert {mistakes[f"unused-{n}"] for n in ("1", "2", "3")} == {
        "AgreedError: 5 of the model's parameters, such as transformer.mask_emb, take no part in classification: add "
        "--ddp_find_unused_parameters"
    }
    assert not [name for name in mistakes if (folder / name).exists() and not name.startswith("unused")]


def test_a_step_whose_gradients_are_not_finite_is_skipped_and_ends_the_run(folder, outcomes):
    problem = outcomes["non-finite"].problem
    assert problem.startswith("RunError: step 3: the loss is not finite")
    assert "the optimizer skipped this step" in problem
    assert [path.name for path in (folder / "non-finite" / "checkpoints").iterdir()] == ["checkpoint-2"]


def test_a_run_whose_steps_are_done_is_evaluated_again(folder):
    assert read_run(folder / "evaluated-only").metrics["loss"] == read_run(folder / "stage-3").metrics["loss"]


def test_the_best_weights_are_loaded_into_shards(folder):
    a, b = (read_run(folder / f"best-{name}") for name in ("stage-3", "ddp"))
    assert a.metrics["loss"] == pytest.approx(b.metrics["loss"], abs=TOLERANCE)
    for name in ("stage-3", "ddp"):
        # The accuracy after step 2 is not exceeded by that after step 4, because the model has hardly been trained.
        best, last = (folder / f"best-{name}/checkpoints/{kept}" for kept in ("best-2", "best-4"))
        assert not last.exists()
        kept, final = load_file(best / "model.safetensors"), load_file(folder / f"best-{name}/model/model.safetensors")
        assert all((kept[key] == final[key]).all() for key in final)


def test_bf16_is_the_autocast_of_ddp(folder):
    assert largest_difference(folder / "bf16-stage-2", folder / "bf16-ddp") < 1e-3


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_usual_fp16_configurations_train_what_ddp_trains_in_fp16(folder, stage):
    run, plain = folder / f"fp16-stage-{stage}", folder / "fp16-ddp"
    assert largest_difference(run, plain) < 1e-3
    assert largest_difference(run, plain, "grad_norm") < 1e-2
    assert largest_difference(run, plain, "learning_rate") == 0
    config = read_settings(run)["deepspeed_config"]
    assert config["fp16"]["initial_scale_power"] == 16
    assert config["torch_autocast"]["dtype"] == "float16"
    weights = load_file(run / "model" / "model.safetensors").values()
    assert {tensor.dtype for tensor in weights} == {torch.float32}


@pytest.mark.parametrize("stage", [3, 1])
def test_steps_that_overflow_in_fp16_are_skipped_and_the_loss_scale_is_restored(folder, stage):
    run, resumed = folder / f"overflows-{stage}", folder / f"overflows-{stage}-resumed"
    norms = [step["grad_norm"] for step in read_steps(run)]
    skipped = norms.count(None)
    assert 2 < skipped < 12
    assert norms[:skipped] == [None] * skipped
    assert read_run(run).metrics["skipped_steps"] == skipped
    schedule = json.loads((run / "checkpoints" / "checkpoint-12" / "schedule.json").read_text())
    assert schedule["loss_scale"]["value"] == 2.0 ** (23 - (skipped - 1)), "the first overflow is tolerated"
    learning_rates = [step["learning_rate"] for step in read_steps(run)]
    assert learning_rates == [step["learning_rate"] for step in read_steps(folder / "fp16-ddp")]
    assert hash_run(resumed) == hash_run(run)


def test_a_strategy_goes_on_with_deepspeeds_loss_scale(folder):
    steps, others = (read_steps(folder / name) for name in ("overflows-1", "overflows-1-as-zero2"))
    # DeepSpeed and `LossScale` change the scale alike, except after the very first overflow.
    assert [step["grad_norm"] is None for step in steps] == [step["grad_norm"] is None for step in others]
    assert abs(steps[-1]["loss"] - others[-1]["loss"]) < 1e-3


def test_fsdp_of_trainer_trains_the_same_once_accelerate_shards_the_model(folder):
    assert largest_difference(folder / "fsdp", folder / "ddp") < TOLERANCE
    assert largest_difference(folder / "fsdp", folder / "ddp", "grad_norm") < TOLERANCE
    assert read_settings(folder / "fsdp")["wrapper"] == "FSDPBertForSequenceClassification"


def test_later_runs_of_the_process_are_plain_again(folder):
    assert first_difference(read_run(folder / "ddp"), read_run(folder / "ddp-after")) is None
    assert read_settings(folder / "ddp-after")["wrapper"] == "DistributedDataParallel"


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_stay_those_of_ddp_for_40_steps(folder, name):
    assert len(read_steps(folder / f"long-{name}")) == 40
    assert largest_difference(folder / f"long-{name}", folder / "long-ddp") < TOLERANCE
