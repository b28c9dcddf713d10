"""The configuration of DeepSpeed: the user's JSON file, completed and checked against the settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.errors import UserError, shorten
from ..common.formats import flatten
from ..data.sampler import BatchPlan
from ..settings import Settings
from ..training.step import warmup_steps

if TYPE_CHECKING:
    from pydantic import ValidationError

Config = dict[str, Any]

# What DeepSpeed calls the schedules of `--lr_scheduler_type`.
SCHEDULERS = {"linear": "WarmupDecayLR", "constant_with_warmup": "WarmupLR", "cosine": "WarmupCosineLR"}
# Keys that only decide what DeepSpeed prints. It has no model that would check their types.
PRINTING: Mapping[str, type] = {
    **dict.fromkeys(("wall_clock_breakdown", "memory_breakdown", "dump_state"), bool),
    **dict.fromkeys(("flops_profiler.enabled", "flops_profiler.detailed"), bool),
    **dict.fromkeys((f"flops_profiler.{key}" for key in ("profile_step", "module_depth", "top_modules")), int),
    "steps_per_print": int,
}
CHECKED_BY_DEEPSPEED = ("zero_optimization", "comms_logger")
# What `--precision` calls the dtypes of autocast.
AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}
# Keys of `zero_optimization` with which DeepSpeed would compute other results, or which are not supported here, and the
# only value of each that is accepted. A section has no value itself if it is an object, as it must be.
FIXED_ZERO_VALUES: Config = {
    **dict.fromkeys((f"zero_quantized_{what}" for what in ("weights", "nontrainable_weights", "gradients")), False),
    **{"zero_hpz_partition_size": 1, "compute_grad_norm": True, "zenflow": None, "legacy_stage1": False},
    **dict.fromkeys(("cpu_offload", "cpu_offload_param", "offload_optimizer", "offload_param")),
    **{"offload_optimizer.ratio": 1.0, "offload_optimizer.super_offload": False},
}


def parse(path: Path) -> Config:
    """Return the content of a JSON file.

    Raises:
        UserError: it cannot be read, is not a JSON object, or repeats a key.
    """

    def reject(constant: str) -> None:  # Python's JSON parser accepts NaN and Infinity
        raise ValueError(f"{constant} is not a JSON value")

    try:
        text = path.read_text(encoding="utf-8")
        config = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=reject)
    except OSError as problem:
        raise UserError(f"--deepspeed {path}: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise UserError(f"--deepspeed {path}: not valid JSON: {problem}") from None
    if not isinstance(config, dict):
        raise UserError(f"--deepspeed {path}: must be a JSON object, as in docs/deepspeed.md")
    return config


def complete_config(config: Config, settings: Settings, plan: BatchPlan) -> Config:
    """Return the configuration with which DeepSpeed follows the settings.

    Args:
        config: the content of the user's file.
        settings: with the learning rate filled in.

    Raises:
        UserError: a value contradicts the settings, is unknown or is not supported. The message names it.
    """
    file = f"--deepspeed {settings.deepspeed}"
    determined = determined_values(settings, plan)
    own = {name: value for name, value in config.items() if name not in CHECKED_BY_DEEPSPEED}
    for key, value in flatten(own).items():
        if kind := PRINTING.get(key):
            if type(value) is not kind:
                raise UserError(f"{file}: {key} is {as_json(value)}: must be of type {kind.__name__}")
        elif key in determined:
            if value not in ("auto", determined[key]):
                if key == "fp16.enabled" and value is True:
                    raise UserError(f"{file}: fp16.enabled is true: add --precision fp16, or remove it")
                expected = as_json(determined[key])
                raise UserError(f'{file}: {key} is {as_json(value)}, not {expected} as set: remove it or set "auto"')
        elif not key.startswith(("fp16.", "bf16.")):  # bf16 is off, and DeepSpeed checks fp16
            raise UserError(f"{file}: {key} is not supported: remove it")
    check_sections(file, config)
    printing = {key.partition(".")[0] for key in PRINTING} | set(CHECKED_BY_DEEPSPEED)
    kept = {key: value for key, value in config.items() if key in printing}
    filled = {key: value for key, value in determined.items() if "." not in key}
    # Trainer writes "no clipping" as infinity, which JSON lacks, so Trainer fills it in.
    filled["gradient_clipping"] = settings.max_grad_norm or "auto"
    if settings.precision in AUTOCAST:
        dtype = AUTOCAST[settings.precision]
        filled["torch_autocast"] = {"enabled": True, "dtype": dtype, "lower_precision_safe_modules": []}
    if settings.precision == "fp16":
        filled["fp16"] = loss_scale_section(file, config.get("fp16", {}))
    return kept | filled


def loss_scale_section(file: str, given: Config) -> Config:
    """Return the complete `fp16` section, with DeepSpeed's defaults, for `DeepSpeedLossScale`.

    It is not enabled, because DeepSpeed would then convert the weights to fp16.
    """
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config
    from pydantic import ValidationError

    values = {key: value for key, value in given.items() if value != "auto"} | {"enabled": True}
    try:
        section: Config = DeepSpeedFP16Config.model_validate(values).model_dump()
    except ValidationError as problem:
        raise invalid_value(file, "fp16", problem) from None
    for key in ("auto_cast", "fp16_master_weights_and_grads"):
        if section.pop(key):
            raise UserError(f"{file}: fp16.{key}: true is not supported: remove it")
    return section | {"enabled": False}


def changes_of_config(state: Mapping[str, Any], config: Config) -> tuple[str, ...]:
    """List the differences from run_state.json by which a resumed run rounds differently than before the checkpoint."""
    recorded = state.get("deepspeed_config")
    if recorded is None:
        return ()
    sections = ("zero_optimization", "fp16")
    before, now = (flatten({name: side.get(name, {}) for name in sections}) for side in (recorded, config))
    return tuple(
        f"{key}: {as_json(now.get(key))}, was {as_json(before.get(key))}"
        for key in before | now
        if before.get(key) != now.get(key)
    )


def determined_values(settings: Settings, plan: BatchPlan) -> Config:
    """Return the values that the settings determine, by key of DeepSpeed's configuration."""
    return {
        "train_batch_size": settings.train_batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_size,
        "gradient_accumulation_steps": plan.micro_batches_per_step,
        "gradient_clipping": settings.max_grad_norm,
        # PyTorch's AdamW, as in the other strategies, even where DeepSpeed would choose and compile its own.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        "optimizer.type": "AdamW",
        "optimizer.params.lr": settings.learning_rate,
        "optimizer.params.betas": [settings.adam_beta1, settings.adam_beta2],
        "optimizer.params.eps": settings.adam_epsilon,
        "optimizer.params.weight_decay": settings.weight_decay,
        "scheduler.type": SCHEDULERS.get(settings.lr_scheduler_type),
        "scheduler.params.total_num_steps": plan.total_steps,
        "scheduler.params.warmup_num_steps": warmup_steps(settings.warmup_steps, plan.total_steps),
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": settings.learning_rate,
        "scheduler.params.warmup_type": "linear",
        # DeepSpeed's bf16 section would keep the weights in bf16; `--precision bf16` is autocast, with weights in fp32.
        # So is `--precision fp16`, of which the fp16 section configures the loss scale.
        "fp16.enabled": settings.precision == "fp16",
        "bf16.enabled": False,
        "torch_autocast.enabled": settings.precision in AUTOCAST,
        "torch_autocast.dtype": AUTOCAST.get(settings.precision, "bfloat16"),
        "torch_autocast.lower_precision_safe_modules": [],
    }


def check_sections(file: str, config: Config) -> None:
    """Let DeepSpeed check its sections, and reject valid values that are not supported here."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    for name, model in zip(CHECKED_BY_DEEPSPEED, (DeepSpeedZeroConfig, CommsLoggerConfig), strict=True):
        try:
            model.model_validate(config.get(name, {}))  # it ignores values that are "auto"
        except ValidationError as problem:
            raise invalid_value(file, name, problem) from None
    zero = config.get("zero_optimization", {})
    stage, values = zero.get("stage"), flatten(zero)
    if stage not in (1, 2, 3) or isinstance(stage, bool):
        raise UserError(f"{file}: zero_optimization.stage is {as_json(stage)}: must be 1, 2 or 3")
    fixed = dict(FIXED_ZERO_VALUES)
    for section, stages in (("offload_optimizer", (1, 2, 3)), ("offload_param", (3,))):
        if values.get(f"{section}.device") != "cpu" or stage not in stages:
            fixed[f"{section}.device"] = "none"
    for key, value in fixed.items():
        if values.get(key, value) != value:
            raise UserError(f"{file}: zero_optimization.{key}: {as_json(values[key])} is not supported: remove it")


def invalid_value(file: str, section: str, problem: ValidationError) -> UserError:
    """Return the error for the first value of a section that DeepSpeed rejects."""
    first = problem.errors()[0]
    key = ".".join(map(str, (section, *first["loc"])))
    return UserError(f"{file}: {key} is {as_json(first['input'])}: {shorten(first['msg'], 120)}")


def as_json(value: Any) -> str:
    return shorten(json.dumps(value, ensure_ascii=False, default=str))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> Config:
    names = [name for name, _ in pairs]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{duplicates[0]} is set more than once")
    return dict(pairs)
