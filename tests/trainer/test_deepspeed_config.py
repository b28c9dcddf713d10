"""DeepSpeed's configuration follows from the settings; a file that contradicts them is rejected with an error."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from helpers.jobs import PROJECT, require_deepspeed
from helpers.worlds import batch_plan, fake_world

from app.common.errors import AgreedError, UserError
from app.settings import Settings
from app.trainer.deepspeed_config import complete_config, parse
from app.trainer.engine import TrainerEngine
from app.training.prepare import resolve_settings

ZERO = {"zero_optimization": {"stage": 2}}
PLAN = batch_plan(2, 4, 3)  # 24 rows: 4 logical ranks x 2 rows x 3 micro-batches


def settings(**values: Any) -> Settings:
    return Settings(deepspeed="ds.json", train_batch_size=24, learning_rate=1e-3, max_grad_norm=0.5, **values)


def rejection(config: dict[str, Any], **values: Any) -> str:
    with pytest.raises(UserError) as problem:
        complete_config(config, settings(**values), PLAN)
    message = str(problem.value)
    assert message.startswith("--deepspeed ds.json: ")
    assert len(message.splitlines()) == 1
    return message.removeprefix("--deepspeed ds.json: ")


AGREEING = {
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 6,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_num_steps": 1}},
    "fp16": {"enabled": False, "loss_scale": 0},
    "bf16": {"enabled": False},
    "wall_clock_breakdown": False,
}


def automatic(config: Any) -> Any:
    """The configuration with every value, except the stage and a switch, replaced by `auto`."""
    return {key: automatic(value) if isinstance(value, dict) else "auto" for key, value in config.items()}


@pytest.mark.parametrize("given", [{}, AGREEING, automatic(AGREEING) | {"wall_clock_breakdown": False}])
def test_missing_and_automatic_values_are_filled_in_from_the_settings(given):
    require_deepspeed()
    config = complete_config(given | ZERO, settings(), PLAN)
    assert config.pop("wall_clock_breakdown", False) is False
    assert config == ZERO | {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 6,
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
    }


def test_bf16_is_autocast_with_weights_and_communication_in_fp32():
    require_deepspeed()
    config = complete_config(ZERO, settings(precision="bf16"), PLAN)
    autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    assert config["torch_autocast"] == autocast
    assert "bf16" not in config


# As tutorials have it for each stage.
USUAL_FP16 = {
    **{"enabled": True, "loss_scale": 0, "loss_scale_window": 500},
    **{"initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
}
FP16_DEFAULTS = {
    **{"enabled": False, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2},
    **{"consecutive_hysteresis": False, "min_loss_scale": 1},
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("given", "section"),
    [
        ({}, {}),
        ({"fp16": USUAL_FP16}, {"loss_scale_window": 500}),
        ({"fp16": dict.fromkeys(USUAL_FP16, "auto")}, {}),
        ({"fp16": {"enabled": True, "loss_scale": 128, "auto_cast": False}}, {"loss_scale": 128}),
    ],
)
def test_fp16_is_autocast_with_the_loss_scale_of_the_file(stage, given, section):
    require_deepspeed()
    config = complete_config(given | {"zero_optimization": {"stage": stage}}, settings(precision="fp16"), PLAN)
    assert config["torch_autocast"] == {"enabled": True, "dtype": "float16", "lower_precision_safe_modules": []}
    assert config["fp16"] == FP16_DEFAULTS | section, "not enabled: the weights stay in fp32"
    assert config["communication_data_type"] == "fp32"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"enabled": False}, 'fp16.enabled is false, not true as set: remove it or set "auto"'),
        ({"loss_scale": -1}, "fp16.loss_scale is -1: "),
        ({"loss_scale_window": True}, "fp16.loss_scale_window is true: "),
        ({"hysteresis": "two"}, 'fp16.hysteresis is "two": '),
        ({"initial_scale": 3}, "fp16.initial_scale is 3: "),
        ({"auto_cast": True}, "fp16.auto_cast: true is not supported: remove it"),
        ({"fp16_master_weights_and_grads": True}, "fp16.fp16_master_weights_and_grads: true is not supported"),
    ],
)
def test_deepspeed_checks_the_section_of_the_loss_scale(section, message):
    require_deepspeed()
    assert message in rejection(ZERO | {"fp16": section}, precision="fp16")


@pytest.mark.parametrize(
    ("given", "values", "message"),
    [
        ({"train_batch_size": 64}, {}, 'train_batch_size is 64, not 24 as set: remove it or set "auto"'),
        ({"train_micro_batch_size_per_gpu": 4}, {}, "train_micro_batch_size_per_gpu is 4, not 2"),
        ({"gradient_accumulation_steps": 3}, {}, "gradient_accumulation_steps is 3, not 6"),
        ({"gradient_clipping": 1.0}, {}, "gradient_clipping is 1.0, not 0.5"),
        ({"optimizer": {"type": "Lamb"}}, {}, 'optimizer.type is "Lamb", not "AdamW"'),
        ({"optimizer": {"params": {"lr": 3e-5}}}, {}, "optimizer.params.lr is 3e-05, not 0.001"),
        ({"optimizer": {"params": {"betas": [0.8, 0.999]}}}, {}, "not [0.9, 0.999]"),
        ({"optimizer": {"params": {"eps": 1}}}, {}, "optimizer.params.eps is 1, not 1e-08"),
        ({"optimizer": {"params": {"weight_decay": 0}}}, {}, "optimizer.params.weight_decay is 0, not 0.01"),
        ({"optimizer": {"params": {"amsgrad": True}}}, {}, "optimizer.params.amsgrad is not supported: remove it"),
        ({"scheduler": {"type": "WarmupLR"}}, {}, 'scheduler.type is "WarmupLR", not "WarmupDecayLR"'),
        ({"scheduler": {"type": "WarmupDecayLR"}}, {"lr_scheduler_type": "cosine"}, 'not "WarmupCosineLR"'),
        ({"scheduler": {"params": {"warmup_num_steps": 5}}}, {}, "scheduler.params.warmup_num_steps is 5, not 1"),
        ({"scheduler": {"params": {"total_num_steps": 99}}}, {}, "scheduler.params.total_num_steps is 99, not 10"),
        ({"fp16": {"enabled": True}}, {}, "fp16.enabled is true: add --precision fp16, or remove it"),
        ({"bf16": {"enabled": True}}, {"precision": "bf16"}, "bf16.enabled is true, not false"),
        ({"torch_autocast": {"enabled": True}}, {}, "torch_autocast.enabled is true, not false"),
        ({"zero_force_ds_cpu_optimizer": True}, {}, "zero_force_ds_cpu_optimizer is true, not false"),
        ({"communication_data_type": "fp16"}, {}, 'communication_data_type is "fp16", not "fp32"'),
        ({"compression_training": {"x": 1}}, {}, "compression_training.x is not supported: remove it"),
        ({"fp16": True}, {}, "fp16 is not supported: remove it"),
        ({"flops_profiler": {"output_file": "x"}}, {}, "flops_profiler.output_file is not supported: remove it"),
        ({"flops_profiler": {"enabled": "auto"}}, {}, 'flops_profiler.enabled is "auto": must be of type bool'),
        ({"steps_per_print": True}, {}, "steps_per_print is true: must be of type int"),
    ],
)
def test_a_value_that_contradicts_the_settings_is_rejected(given, values, message):
    assert message in rejection(ZERO | given, **values)


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        (2, "zero_optimization is 2: "),
        (None, "zero_optimization is null: "),
        ({}, "zero_optimization.stage is null: must be 1, 2 or 3"),
        ({"stage": 0}, "zero_optimization.stage is 0: must be 1, 2 or 3"),
        ({"stage": True}, "zero_optimization.stage is true: must be 1, 2 or 3"),
        ({"stage": 2, "overlap_com": True}, "zero_optimization.overlap_com is true: "),
        ({"stage": 2, "reduce_bucket_size": "many"}, 'zero_optimization.reduce_bucket_size is "many": '),
        ({"stage": 2, "legacy_stage1": True}, "zero_optimization.legacy_stage1: true is not supported: remove it"),
        ({"stage": 3, "zero_quantized_gradients": True}, "zero_optimization.zero_quantized_gradients: true is not"),
        ({"stage": 3, "zero_hpz_partition_size": 2}, "zero_optimization.zero_hpz_partition_size: 2 is not supported"),
        ({"stage": 2, "cpu_offload": True}, "zero_optimization.cpu_offload: true is not supported"),
        ({"stage": 2, "offload_optimizer": "auto"}, 'zero_optimization.offload_optimizer: "auto" is not supported'),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, 'offload_optimizer.device: "nvme" is not supported'),
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "offload_optimizer.ratio: 0.5 is not"),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, 'offload_param.device: "cpu" is not supported'),
    ],
)
def test_deepspeed_checks_its_section_and_what_changes_results_is_rejected(zero, message):
    require_deepspeed()
    assert message in rejection({"zero_optimization": zero})


@pytest.mark.parametrize("section", ["x", {"enabled": "maybe"}, {"unknown": True}])
def test_deepspeed_checks_the_section_of_its_communication_log(section):
    require_deepspeed()
    assert rejection(ZERO | {"comms_logger": section}).startswith("comms_logger")


def test_no_clipping_is_left_to_trainer():
    require_deepspeed()
    config = complete_config(ZERO, Settings(deepspeed="ds.json", train_batch_size=24, max_grad_norm=0), PLAN)
    assert config["gradient_clipping"] == "auto"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON: "),
        (b"\xff{}", "not valid JSON: "),
        (b'{"zero_optimization": {"stage": NaN}}', "not valid JSON: NaN is not a JSON value"),
        (b"[]", "must be a JSON object"),
        (b'{"zero_optimization": {"stage": 1, "stage": 2}}', "not valid JSON: stage is set more than once"),
        (None, "No such file or directory"),
    ],
)
def test_a_file_that_is_no_configuration_is_rejected_in_one_line(tmp_path, content, message):
    file = tmp_path / "ds.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError) as problem:
        parse(file)
    assert message in str(problem.value)
    assert str(problem.value).startswith(f"--deepspeed {file}: ")
    assert len(str(problem.value).splitlines()) == 1


@pytest.mark.parametrize(("flag", "value"), [("deepspeed", "ds.json"), ("fsdp", True)])
def test_only_the_trainer_path_has_it(flag, value, world):
    with pytest.raises(AgreedError, match=f"--{flag}: only app.trainer_run has it"):
        resolve_settings("ddp_loop", Settings(use_cpu=True, **{flag: value}), world)


def test_it_must_be_installed(monkeypatch):
    world = fake_world()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"DeepSpeed is not installed: run .*\.\[deepspeed\]"):
        TrainerEngine().check(Settings(deepspeed="ds.json"), world)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    TrainerEngine().check(Settings(deepspeed="ds.json"), world)


def test_fsdp_of_trainer_is_refused_on_cpus_where_it_would_be_plain_ddp():
    with pytest.raises(UserError, match=r"--fsdp needs GPUs: .* use --strategy zero3"):
        TrainerEngine().check(Settings(fsdp=True), fake_world())
    TrainerEngine().check(Settings(fsdp=True), fake_world(device="cuda"))


def test_the_example_in_the_documentation_is_accepted():
    require_deepspeed()
    config = complete_config(parse(PROJECT / "docs" / "deepspeed_zero3.json"), settings(), PLAN)
    assert config["zero_optimization"]["stage"] == 3
