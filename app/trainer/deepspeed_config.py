"""The configuration of DeepSpeed: the user's JSON file, completed and checked against the settings."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..common.errors import UserError, shorten
from ..data.sampler import BatchPlan
from ..distributed.collectives import broadcast_object, raise_on_all_ranks
from ..distributed.world import World
from ..settings import Settings
from ..training.optim import warmup_steps

Config = dict[str, Any]

INSTALLATION = (
    "bash run_scripts/setup.sh --deepspeed, or DS_BUILD_OPS=0 pip install --no-build-isolation -e '.[deepspeed]'"
)
# What DeepSpeed calls the schedules of `--lr_scheduler_type`.
SCHEDULERS = {"linear": "WarmupDecayLR", "constant_with_warmup": "WarmupLR", "cosine": "WarmupCosineLR"}
# Values that only decide what DeepSpeed prints, which it gets as they are. (accelerate turns `steps_per_print` off.)
WITHOUT_EFFECT_ON_RESULTS: Mapping[str, type] = {
    "steps_per_print": int,
    "wall_clock_breakdown": bool,
    "memory_breakdown": bool,
    "dump_state": bool,
    "comms_logger.enabled": bool,
    "comms_logger.verbose": bool,
    "comms_logger.debug": bool,
    "comms_logger.prof_all": bool,
    "comms_logger.prof_ops": list,
    "flops_profiler.enabled": bool,
    "flops_profiler.detailed": bool,
    "flops_profiler.profile_step": int,
    "flops_profiler.module_depth": int,
    "flops_profiler.top_modules": int,
}
LARGEST_INTEGER = 2**63 - 1  # what PyTorch accepts as a size
JSON_TYPES = {int: "an integer", bool: "true or false", list: "an array"}
# Values of `zero_optimization` that may not be changed: others change results, or are not supported here.
FIXED_ZERO_VALUES: Mapping[str, tuple[Any, str]] = {
    "zero_quantized_weights": (False, "communication is in fp32"),
    "zero_quantized_nontrainable_weights": (False, "communication is in fp32"),
    "zero_quantized_gradients": (False, "communication is in fp32"),
    "zero_hpz_partition_size": (1, "parameters are sharded over all ranks"),
    "compute_grad_norm": (True, "every step records its gradient norm"),
    "zenflow": (None, "every step updates all parameters"),
    "legacy_stage1": (False, "DeepSpeed no longer supports it"),
    "offload_optimizer.ratio": (1.0, "the optimizer state is offloaded as a whole"),
    "offload_optimizer.super_offload": (False, "the optimizer is PyTorch's AdamW"),
    "cpu_offload": (None, "the name today is offload_optimizer"),
    "cpu_offload_param": (None, "the name today is offload_param"),
}


def check_engine(settings: Settings, world: World) -> None:
    """Check that the run can use `--deepspeed` or `--fsdp`.

    Raises:
        UserError: DeepSpeed is not installed, or `--fsdp` has no GPUs.
    """
    if settings.fsdp and world.device.type == "cpu":
        raise UserError("--fsdp needs GPUs: on CPUs Trainer would train with plain DDP; use --strategy zero3")
    if settings.deepspeed is not None and importlib.util.find_spec("deepspeed") is None:
        raise UserError(f"--deepspeed: DeepSpeed is not installed: run {INSTALLATION}")


def read_config(settings: Settings, world: World) -> Config | None:
    """Read the file that `--deepspeed` names. Collective.

    Returns:
        Its content, the same on every rank; None without `--deepspeed`.

    Raises:
        AgreedError: rank 0 can't read the file.
    """
    if settings.deepspeed is None:
        return None
    config: Config = {}
    with raise_on_all_ranks(world):
        if world.is_main_process:
            config = parse(Path(settings.deepspeed))
    return broadcast_object(config, world)


def parse(path: Path) -> Config:
    """Return the content of a JSON file.

    Raises:
        UserError: it can't be read, is not a JSON object, or repeats a key.
    """
    try:
        config = json.loads(
            path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant
        )
    except OSError as problem:
        raise UserError(f"--deepspeed {path}: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise UserError(f"--deepspeed {path}: not valid JSON: {problem}") from None
    if not isinstance(config, dict):
        raise UserError(f"--deepspeed {path}: must be a JSON object, as in docs/deepspeed.md")
    return config


def complete_config(config: Config, settings: Settings, plan: BatchPlan) -> Config:
    """Return the configuration with which DeepSpeed trains what the settings say.

    Args:
        config: the content of the user's file.
        settings: with the learning rate filled in.

    Raises:
        UserError: a value contradicts the settings, is unknown or is not supported. The message names it.
    """
    file = f"--deepspeed {settings.deepspeed}"
    determined = determined_values(settings, plan)
    problems: list[str] = []
    for key, value in flatten(config):
        if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            problems.append(f"{key} is {as_json(value)}: must be at most {LARGEST_INTEGER}")
        if key.partition(".")[0] == "zero_optimization":
            continue
        if kind := WITHOUT_EFFECT_ON_RESULTS.get(key):
            if type(value) is not kind:
                problems.append(f"{key} is {as_json(value)}: must be {JSON_TYPES[kind]}")
        elif key in determined:
            expected, source = determined[key]
            if value != "auto" and value != expected:
                problems.append(f'{key} is {as_json(value)}, but {source}: remove it or set "auto"')
        elif not key.startswith(("fp16.", "bf16.")):  # their other keys have no effect, because both are off
            problems.append(f"{key} is not supported: remove it")
    zero = config.get("zero_optimization")
    if isinstance(zero, dict):
        problems += zero_problems(zero)
    elif zero is None:
        problems.append('zero_optimization is missing: add "zero_optimization": {"stage": 2}, or remove --deepspeed')
    else:
        problems.append(f'zero_optimization is {as_json(zero)}: must be an object, such as {{"stage": 2}}')
    if problems:
        raise UserError(f"{file}: {'; '.join(problems)}")
    assert isinstance(zero, dict)
    check_zero_section(file, zero)
    printing = {key.partition(".")[0] for key in WITHOUT_EFFECT_ON_RESULTS}
    kept = {key: value for key, value in config.items() if key in printing}
    filled = {key: value for key, (value, _) in determined.items() if "." not in key}
    # Trainer writes "no clipping" as infinity, which JSON lacks, so Trainer fills it in.
    filled["gradient_clipping"] = settings.max_grad_norm or "auto"
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}}
    return kept | filled | {"zero_optimization": zero} | (autocast if settings.precision == "bf16" else {})


def changes_of_config(state: Mapping[str, Any], config: Config) -> tuple[str, ...]:
    """List what makes a resumed run differ by rounding from the run that wrote the checkpoint.

    Args:
        state: the content of run_state.json.
        config: as returned by `complete_config`.
    """
    recorded = state.get("deepspeed_config")
    if recorded is None:
        return ()
    before, now = (dict(flatten(one["zero_optimization"])) for one in (recorded, config))
    return tuple(
        f"zero_optimization.{key}: {as_json(now.get(key))}, was {as_json(before.get(key))}"
        for key in before | now
        if before.get(key) != now.get(key)
    )


def determined_values(settings: Settings, plan: BatchPlan) -> dict[str, tuple[Any, str]]:
    """Return what the settings determine: by key of DeepSpeed's configuration, the value and where it comes from."""
    rate, schedule = settings.learning_rate, settings.lr_scheduler_type
    warmup = warmup_steps(settings.warmup_steps, plan.total_steps)
    betas = [settings.adam_beta1, settings.adam_beta2]

    def flag(name: str) -> tuple[Any, str]:
        value = getattr(settings, name)
        return value, f"--{name} is {value}"

    return {
        "train_batch_size": flag("train_batch_size"),
        "train_micro_batch_size_per_gpu": (plan.micro_size, f"the batch is divided as {plan}"),
        "gradient_accumulation_steps": (plan.micro_batches_per_step, f"the batch is divided as {plan}"),
        "gradient_clipping": flag("max_grad_norm"),
        # PyTorch's AdamW, as in the other strategies, also where DeepSpeed would choose and compile its own.
        "zero_allow_untested_optimizer": (True, "the optimizer is PyTorch's AdamW"),
        "zero_force_ds_cpu_optimizer": (False, "the optimizer is PyTorch's AdamW"),
        "communication_data_type": ("fp32", "communication is in fp32"),
        "optimizer.type": ("AdamW", "the optimizer is AdamW"),
        "optimizer.params.lr": (rate, f"--learning_rate is {rate}"),
        "optimizer.params.betas": (betas, f"--adam_beta1 and --adam_beta2 are {betas}"),
        "optimizer.params.eps": flag("adam_epsilon"),
        "optimizer.params.weight_decay": flag("weight_decay"),
        "scheduler.type": (SCHEDULERS.get(schedule), f"--lr_scheduler_type is {schedule}"),
        "scheduler.params.total_num_steps": (plan.total_steps, f"the run has {plan.total_steps} steps"),
        "scheduler.params.warmup_num_steps": (warmup, f"--warmup_steps is {settings.warmup_steps} ({warmup} steps)"),
        "scheduler.params.warmup_min_lr": (0, "warmup starts at 0"),
        "scheduler.params.warmup_max_lr": (rate, f"--learning_rate is {rate}"),
        "scheduler.params.warmup_type": ("linear", "warmup is linear"),
        "fp16.enabled": (False, f"--precision is {settings.precision}, with weights in fp32"),
        "bf16.enabled": (False, f"--precision is {settings.precision}, with weights in fp32 (torch_autocast)"),
        "torch_autocast.enabled": (settings.precision == "bf16", f"--precision is {settings.precision}"),
        "torch_autocast.dtype": ("bfloat16", "--precision is fp32 or bf16"),
        "torch_autocast.lower_precision_safe_modules": ([], "communication is in fp32"),
    }


def zero_problems(zero: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is not supported in the section `zero_optimization`."""
    values = dict(flatten(zero))
    stage = values.get("stage")
    if stage not in (1, 2, 3) or isinstance(stage, bool):
        yield f"zero_optimization.stage is {as_json(stage)}: must be 1, 2 or 3"
    for key, (only, reason) in FIXED_ZERO_VALUES.items():
        if values.get(key, only) != only:
            yield f"zero_optimization.{key} is {as_json(values[key])}, but {reason}: remove it"
    for section in ("offload_optimizer", "offload_param"):
        if not isinstance(zero.get(section), dict | None):
            value = as_json(zero[section])
            yield f'zero_optimization.{section} is {value}: must be an object, such as {{"device": "cpu"}}'
        device = values.get(f"{section}.device", "none")
        if device not in ("none", "cpu"):
            yield f"zero_optimization.{section}.device is {as_json(device)}: must be cpu or none"
    if values.get("offload_param.device", "none") != "none" and stage != 3:
        yield f"zero_optimization.offload_param needs stage 3, not {as_json(stage)}: remove it"


def check_zero_section(file: str, zero: Mapping[str, Any]) -> None:
    """Let DeepSpeed check the names and the values of the section `zero_optimization`.

    Raises:
        UserError: names the first problem.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    try:
        DeepSpeedZeroConfig(**zero)  # which ignores "auto"
    except ValidationError as problem:
        first = problem.errors()[0]
        key = ".".join(map(str, ("zero_optimization", *first["loc"])))
        value = shorten(as_json(first["input"]))
        raise UserError(f"{file}: {key} is {value}: {shorten(first['msg'], 120)}") from None


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested objects with their keys, which are joined with dots."""
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def as_json(value: Any) -> str:
    """Return a value as it looks in the file, shortened."""
    return shorten(json.dumps(value, ensure_ascii=False, default=str))


def _refuse_constant(name: str) -> None:
    """Refuse NaN and Infinity, which Python's JSON parser accepts."""
    raise ValueError(f"{name} is not a JSON value")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> Config:
    names = [name for name, _ in pairs]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{duplicates[0]} is set more than once")
    return dict(pairs)
