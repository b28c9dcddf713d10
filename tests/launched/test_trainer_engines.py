"""Trainer with DeepSpeed or FSDP2 trains what plain DDP trains, up to rounding, with the same files, and resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import TrainingRun, read_steps, require_deepspeed, require_success, run_many, write_subset
from safetensors.torch import load_file
from transformers import pipeline

from app.report.bitwise import first_difference
from app.runs.reader import read_run

pytestmark = pytest.mark.launched
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
FLAGS = ["--csv=reviews.csv", "--max_length=32", "--train_batch_size=16", "--dropout=0.1"]
# 4 steps, two micro-batches for each of 2 logical ranks, and gradients that are clipped.
SHORT = [*FLAGS, "--max_steps=4", "--logical_ranks=2", "--gradient_accumulation_steps=2", "--max_grad_norm=0.3"]
SHORT += ["--save_strategy=steps", "--save_steps=2", "--save_total_limit=9", "--eval_strategy=steps", "--eval_steps=2"]
BEST = ["--validation_size=0.2", "--load_best_model_at_end"]
BF16 = ["--bf16", "--max_steps=2"]


def write_configs(folder: Path, **more: bool) -> None:
    for name, zero in CONFIGS.items():
        (folder / f"{name}.json").write_text(json.dumps({"zero_optimization": zero | more}))
    (folder / "other-batch.json").write_text(json.dumps({"train_batch_size": 64, "zero_optimization": {"stage": 1}}))


def with_config(name: str, flags: list[str]) -> TrainingRun:
    return TrainingRun("trainer_run", [*flags, f"--deepspeed={name}.json"])


@pytest.fixture(scope="module")
def folder(hotel_csv, tmp_path_factory) -> Path:
    """The folder of all short runs, which 2 ranks have trained in one job."""
    require_deepspeed()
    folder = tmp_path_factory.mktemp("deepspeed")
    write_subset(hotel_csv, folder / "reviews.csv", 121)  # 13 test rows: the ranks have different numbers of them
    # Otherwise stage 3 replaces torch.nn.functional.linear, also for the runs that follow it in the same process.
    write_configs(folder, memory_efficient_linear=False)
    halfway = {name: f"--resume_from_checkpoint={name}/checkpoints/checkpoint-2" for name in CONFIGS}
    runs = {
        "ddp": TrainingRun("trainer_run", SHORT),
        **{name: with_config(name, SHORT) for name in CONFIGS},
        **{f"{name}-resumed": with_config(name, [*SHORT, halfway[name]]) for name in ("stage-1", "stage-3-offload")},
        "stage-2-as-3": with_config("stage-3", [*SHORT, halfway["stage-2"]]),
        "stage-3-as-ddp": TrainingRun("trainer_run", [*SHORT, halfway["stage-3"]]),
        "evaluated-only": with_config("stage-3", [*SHORT, "--resume_from_checkpoint=stage-3/checkpoints/checkpoint-4"]),
        "best-ddp": TrainingRun("trainer_run", [*SHORT, *BEST]),
        "best-stage-3": with_config("stage-3", [*SHORT, *BEST]),
        "bf16-ddp": TrainingRun("trainer_run", [*SHORT, *BF16]),
        "bf16-stage-2": with_config("stage-2", [*SHORT, *BF16]),
        "fsdp": TrainingRun("trainer_run", [*SHORT, "--fsdp"], mutation="cpus_as_gpus"),
        "fsdp-resumed": TrainingRun(
            "trainer_run",
            [*SHORT, "--fsdp", "--resume_from_checkpoint=fsdp/checkpoints/checkpoint-2"],
            mutation="cpus_as_gpus",
        ),
        "ddp-after": TrainingRun("trainer_run", SHORT),
    }
    mistakes = {
        "wrong-path": TrainingRun("ddp_loop", [*SHORT, "--deepspeed=stage-1.json"]),
        "contradiction": with_config("other-batch", SHORT),
        "fsdp-on-cpus": TrainingRun("trainer_run", [*SHORT, "--fsdp"]),
        "no-file": with_config("none", SHORT),
    }
    outcomes = run_many(folder, runs | mistakes)
    require_success({name: outcomes[name] for name in runs})
    (folder / "mistakes.json").write_text(json.dumps({name: outcomes[name].problem for name in mistakes}))
    (folder / "resumed.txt").write_text(outcomes["stage-3-as-ddp"].out)
    return folder


def largest_difference(a: Path, b: Path, key: str = "loss") -> float:
    steps, others = read_steps(a), read_steps(b)
    assert len(steps) == len(others) > 0
    return max(abs(one[key] - other[key]) for one, other in zip(steps, others, strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_gradient_norms_are_those_of_ddp(folder, name):
    assert largest_difference(folder / name, folder / "ddp") < TOLERANCE
    assert largest_difference(folder / name, folder / "ddp", "grad_norm") < TOLERANCE
    a, b = (read_run(folder / run) for run in (name, "ddp"))
    assert (a.predictions["row"] == b.predictions["row"]).all()
    assert a.metrics["loss"] == pytest.approx(b.metrics["loss"], abs=TOLERANCE)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_engine_is_deepspeeds_and_recorded(folder, name):
    settings = json.loads((folder / name / "settings.json").read_text())
    assert settings["wrapper"] == "DeepSpeedEngine"
    assert settings["deepspeed_config"]["zero_optimization"] == CONFIGS[name] | {"memory_efficient_linear": False}
    assert settings["deepspeed_config"]["gradient_accumulation_steps"] == 2
    assert json.loads((folder / "ddp" / "settings.json").read_text())["deepspeed_config"] is None


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_is_complete_and_loads_with_pipeline(folder, name):
    weights, expected = (load_file(folder / run / "model" / "model.safetensors") for run in (name, "ddp"))
    assert {key: tensor.shape for key, tensor in weights.items()} == {k: t.shape for k, t in expected.items()}
    for key, tensor in weights.items():
        assert (tensor - expected[key]).abs().max() < 1e-3, key
    assert len(pipeline("text-classification", model=str(folder / name / "model"))(["很好", "很差"])) == 2


@pytest.mark.parametrize("name", ["stage-1", "stage-3-offload"])
def test_a_resumed_run_is_bitwise_identical(folder, name):
    assert first_difference(read_run(folder / name), read_run(folder / f"{name}-resumed")) is None


def test_a_run_resumes_with_another_stage_or_without_deepspeed(folder):
    for name in ("stage-2-as-3", "stage-3-as-ddp"):
        assert largest_difference(folder / name, folder / "ddp") < TOLERANCE
        assert largest_difference(folder / name, folder / "ddp", "grad_norm") < TOLERANCE
    assert "engine: PyTorch, was DeepSpeed" in (folder / "resumed.txt").read_text()


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


def test_fsdp_of_trainer_trains_the_same_once_accelerate_shards_the_model(folder):
    for name in ("fsdp", "fsdp-resumed"):
        assert largest_difference(folder / name, folder / "ddp") < TOLERANCE
        assert largest_difference(folder / name, folder / "ddp", "grad_norm") < TOLERANCE
        settings = json.loads((folder / name / "settings.json").read_text())
        assert settings["wrapper"] == "FSDPBertForSequenceClassification"
    assert first_difference(read_run(folder / "fsdp"), read_run(folder / "fsdp-resumed")) is None


def test_later_runs_of_the_process_are_plain_again(folder):
    assert first_difference(read_run(folder / "ddp"), read_run(folder / "ddp-after")) is None
    assert json.loads((folder / "ddp-after" / "settings.json").read_text())["wrapper"] == "DistributedDataParallel"


def test_a_mistake_is_one_line_that_names_what_to_change(folder):
    mistakes = json.loads((folder / "mistakes.json").read_text())
    assert "only the Trainer path has it" in mistakes["wrong-path"]
    assert 'train_batch_size is 64, but --train_batch_size is 16: remove it or set "auto"' in mistakes["contradiction"]
    assert "--deepspeed none.json: No such file or directory" in mistakes["no-file"]
    assert "--fsdp needs GPUs" in mistakes["fsdp-on-cpus"]
    assert not [name for name in mistakes if (folder / name).exists()]


@pytest.mark.slow
def test_losses_stay_those_of_ddp_for_100_steps(hotel_csv, tmp_path):
    require_deepspeed()
    write_subset(hotel_csv, tmp_path / "reviews.csv", 1500)
    write_configs(tmp_path)
    long = [*FLAGS, "--max_steps=100", "--save_strategy=no", "--eval_strategy=no"]
    runs = {"ddp": TrainingRun("trainer_run", long), **{name: with_config(name, long) for name in CONFIGS}}
    require_success(run_many(tmp_path, runs))
    differences = {name: largest_difference(tmp_path / name, tmp_path / "ddp") for name in CONFIGS}
    assert all(difference < TOLERANCE for difference in differences.values()), differences
