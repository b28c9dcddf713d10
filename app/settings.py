"""All settings of a training run, as dataclasses that validate themselves.

The command line, `--config` files and `settings.json` are all derived from these classes. Names follow
`transformers.TrainingArguments`, with one deliberate exception: `train_batch_size` is the *global* batch size, which is
divided among ranks and accumulation steps, so that one process and eight train on the same batches.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .common.errors import UserError, shorten
from .common.paths import DOWNLOADED_CSV, SAMPLE_CSV

WRAPPED_IN_DDP = ("ddp", "zero1")  # the strategies that use DDP, and so have --ddp_comm_hook
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")  # the values of --strategy
TINY = "tiny"
LARGEST_COUNT = 2**31 - 1  # every library used here accepts counts and seeds up to this value
MAX_PROFILED = 1000  # steps: the trace of one has some ten thousand events
MAX_THREADS = 1024  # OpenMP aborts the process if the system cannot provide the requested threads


def setting(default: Any, help: str) -> Any:
    """Create a dataclass field with its `--help` text (in which argparse would interpret a bare %)."""
    return field(default=default, metadata={"help": help.replace("%", "%%")})


@dataclass
class DataSettings:
    _argument_group_name = "data"

    csv: str | None = setting(
        None, f"CSV file of reviews; default: data/{DOWNLOADED_CSV.name} if downloaded, otherwise the bundled sample"
    )
    text_column: str = setting("review", "column that contains the text")
    label_column: str = setting("label", "column that contains the class: two or more distinct integers or strings")
    test_size: float = setting(0.1, "fraction of the rows, between 0 and 1, to hold out as test rows")
    validation_size: float = setting(
        0.0, "fraction of the remaining rows to hold out for monitoring and for choosing the best weights; 0: none"
    )
    max_length: int = setting(
        128, "maximum number of tokens per review, including special tokens; longer reviews are truncated"
    )
    cache_dir: str = setting("runs/cache", "folder of the token cache, which all runs share; safe to delete")


@dataclass
class ModelSettings:
    _argument_group_name = "model"

    model: str = setting(
        TINY, f"model name on the Hugging Face Hub, local folder, or `{TINY}`: an untrained BERT with 2 layers x 128"
    )
    revision: str | None = setting(None, "branch, tag or commit of a model on the Hub; default: its main branch")
    dropout: float | None = setting(
        None, "dropout probability that replaces every dropout probability in the model's config"
    )
    trust_remote_code: bool = setting(False, "run Python code from the model's repository; only for authors you trust")


@dataclass
class TrainingSettings:
    _argument_group_name = "training (identical in both training paths)"

    train_batch_size: int = setting(
        32, "global batch size: examples per optimizer step over all ranks and accumulation steps"
    )
    per_device_train_batch_size: int | None = setting(
        None, "instead of --train_batch_size: examples per rank and accumulation step"
    )
    gradient_accumulation_steps: int = setting(
        1, "accumulation steps (micro-batches) per optimizer step, into which the global batch is divided"
    )
    logical_ranks: int | None = setting(
        None,
        "equal shares of the global batch, a power of two; every number of ranks that divides it gives bitwise "
        "identical results; default: the number of ranks, or that of the run to resume",
    )
    num_train_epochs: float = setting(3.0, "number of passes over the training rows")
    max_steps: int = setting(-1, "total number of optimizer steps, overriding --num_train_epochs; -1: not set")
    learning_rate: float | None = setting(
        None, "peak learning rate; default: 2e-5 for pretrained weights, otherwise 1e-3"
    )
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = setting(
        "linear", "learning rate schedule after warmup"
    )
    warmup_steps: float = setting(0.1, "optimizer steps of linear warmup; a value below 1 is a fraction of all steps")
    weight_decay: float = setting(0.01, "AdamW's weight decay; biases and normalization weights are exempt")
    adam_beta1: float = setting(0.9, "AdamW's beta1")
    adam_beta2: float = setting(0.999, "AdamW's beta2")
    adam_epsilon: float = setting(1e-8, "AdamW's epsilon")
    max_grad_norm: float = setting(1.0, "clip gradients to this global norm; 0: no clipping")
    train_sampling_strategy: Literal["group_by_length", "random"] = setting(
        "group_by_length", "form batches of reviews of similar length (less padding) or of random reviews"
    )
    seed: int = setting(42, "seed of the split, the initial weights, the data order and dropout")
    precision: Literal["fp32", "bf16", "fp16", "fp64"] | None = setting(
        None,
        "fp32, bf16 or fp16 (autocast; weights stay in fp32; fp16 with loss scaling) or fp64 (for numerical checks); "
        "default: fp32",
    )
    bf16: bool = setting(False, "same as --precision bf16")
    ddp_comm_hook: Literal["no", "fp16", "bf16", "power_sgd"] = setting(
        "no",
        "ddp and zero1: compress the gradients that the ranks exchange, by rounding them to fp16 or bf16, or with "
        "PowerSGD, whose results depend on the number of ranks",
    )
    deterministic: bool = setting(
        False, "GPU: use only deterministic algorithms (slower; fails for operations that have none). CPU: no effect"
    )


@dataclass
class EvaluationSettings:
    _argument_group_name = (
        "evaluation during training, on the validation rows or, without any, on the test rows (for monitoring only)"
    )

    eval_strategy: Literal["epoch", "steps", "no"] = setting("epoch", "when to evaluate")
    eval_steps: int = setting(500, "optimizer steps between evaluations with --eval_strategy steps")
    eval_batch_size: int = setting(
        64, "examples per evaluation batch; affects padding, and thereby scores by rounding error"
    )


@dataclass
class CheckpointSettings:
    _argument_group_name = "checkpoints and resuming"

    save_strategy: Literal["epoch", "steps", "no"] = setting("epoch", "when to save a checkpoint")
    save_steps: int = setting(500, "optimizer steps between checkpoints with --save_strategy steps")
    save_total_limit: int = setting(2, "number of checkpoints to keep; older ones are deleted")
    on_save_failure: Literal["continue", "stop"] = setting(
        "continue", "continue or stop training if a checkpoint or log cannot be written, for example on a full disk"
    )
    resume_from_checkpoint: str | None = setting(
        None,
        "checkpoint or run folder to resume from; `auto`: the run in --output_dir or, if not given, the latest run",
    )
    load_best_model_at_end: bool = setting(
        False, "finish with the weights that were best on the validation rows instead of the last weights"
    )
    metric_for_best_model: Literal["accuracy", "f1", "loss"] = setting(
        "accuracy", "metric that determines the best weights (for loss, lower is better)"
    )


@dataclass
class ProcessSettings:
    _argument_group_name = "processes and devices"

    use_cpu: bool = setting(False, "train on the CPU even if GPUs are available")
    strategy: Literal["ddp", "zero1", "zero2", "zero3"] = setting(
        "ddp",
        "what is sharded over the ranks: nothing (ddp), optimizer state (zero1), also gradients, and parameters "
        "between steps (zero2), parameters at any time (zero3); results are bitwise identical",
    )
    deepspeed: str | None = setting(
        None,
        "trainer_run: train with DeepSpeed's ZeRO as this JSON configuration says; what the settings determine is "
        'filled in where it is missing or "auto"',
    )
    fsdp: bool = setting(
        False, "trainer_run on GPUs: shard parameters with Trainer's own FSDP2; --strategy zero3 does so in both paths"
    )
    cpu_offload: bool = setting(False, "zero3 on GPUs: keep parameters, gradients and optimizer state in main memory")
    activation_checkpointing: bool = setting(
        False, "recompute the activations of each layer in the backward pass to save memory"
    )
    threads: int = setting(
        0,
        "CPU threads per rank, which affect rounding; 0: as in the run to resume, otherwise the node's cores divided "
        "by --logical_ranks or, if not set, by its ranks",
    )
    ddp_find_unused_parameters: bool = setting(
        False, "let DDP search for parameters without a gradient in every step (slower; some models require it)"
    )
    ddp_bucket_cap_mb: int | None = setting(None, "size of DDP's gradient buckets in MiB; default: PyTorch's")
    ddp_timeout: int = setting(1800, "seconds that a rank waits for the others before it fails")


@dataclass
class OutputSettings:
    _argument_group_name = "output"

    output_dir: str | None = setting(
        None, "folder for the files of the run, which must be new or empty; default: a new folder under runs/"
    )
    logging_steps: int = setting(
        10, "optimizer steps per logging interval; at its end, losses are averaged over the ranks and logged"
    )
    disable_tqdm: bool = setting(False, "disable progress bars, which appear only on a terminal")
    dry_run: bool = setting(
        False, "print what the run will need on each rank (memory, traffic), and exit before loading weights"
    )
    profile: int = setting(
        0, "training steps to profile, after the first four: writes a trace and where the time goes; 0: none"
    )
    measure_peak_flops: bool = setting(
        False, "measure the matrix multiplication speed of each device before training, to report MFU relative to it"
    )


@dataclass
class Settings(
    OutputSettings,
    ProcessSettings,
    CheckpointSettings,
    EvaluationSettings,
    TrainingSettings,
    ModelSettings,
    DataSettings,
):  # dataclasses collect fields from the last base class to the first, so settings.json starts with the data
    """The validated settings of a run.

    Raises:
        UserError: One or more values are invalid. The message names every such flag and what is allowed.
    """

    def __post_init__(self) -> None:
        problems = [message for is_valid, message in self._checks() if not is_valid]
        if problems:
            raise UserError("; ".join(problems))
        self.precision = "bf16" if self.bf16 else self.precision or "fp32"
        self.bf16 = self.precision == "bf16"

    def _checks(self) -> list[tuple[bool, str]]:
        """Return (is valid, error message) pairs. NaN is rejected because it fails every comparison."""

        def number(name: str, is_valid: Callable[[Any], bool], requirement: str) -> tuple[bool, str]:
            value = getattr(self, name)
            # math.isfinite would raise for integers that are too large for a float.
            passes = value is None or (abs(value) <= sys.float_info.max and is_valid(value))
            return passes, f"--{name} {shorten(str(value))}: must be {requirement}"

        counts = (
            *("train_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps", "logical_ranks"),
            *(
                "eval_steps",
                "eval_batch_size",
                "ddp_bucket_cap_mb",
                "ddp_timeout",
                "logging_steps",
                "save_steps",
                "save_total_limit",
            ),
        )
        at_most = f"and at most {LARGEST_COUNT}"
        return [
            number("test_size", lambda x: 0 < x < 1, "a fraction of the rows between 0 and 1, such as 0.1"),
            number("validation_size", lambda x: 0 <= x < 1, "0 or a fraction of the training rows below 1"),
            number("max_length", lambda n: 3 <= n <= LARGEST_COUNT, f"3 tokens or more {at_most}"),
            number("dropout", lambda p: 0 <= p < 1, "a probability: 0 or more and below 1"),
            *(number(name, lambda n: 1 <= n <= LARGEST_COUNT, f"1 or more {at_most}") for name in counts),
            number("num_train_epochs", lambda n: 0 < n <= LARGEST_COUNT, f"more than 0 {at_most}"),
            number("max_steps", lambda n: n == -1 or 1 <= n <= LARGEST_COUNT, f"1 or more {at_most}, or -1 (not set)"),
            number("learning_rate", lambda x: x > 0, "a number above 0, such as 2e-5"),
            number("warmup_steps", lambda n: 0 <= n <= LARGEST_COUNT, f"0 or more {at_most}"),
            number("weight_decay", lambda x: x >= 0, "0 or more"),
            number("adam_beta1", lambda x: 0 <= x < 1, "0 or more and below 1"),
            number("adam_beta2", lambda x: 0 <= x < 1, "0 or more and below 1"),
            number("adam_epsilon", lambda x: x > 0, "above 0"),
            number("max_grad_norm", lambda x: x >= 0, "0 or more"),
            number("profile", lambda n: 0 <= n <= MAX_PROFILED, f"between 0 and {MAX_PROFILED}"),
            number("seed", lambda x: 0 <= x <= LARGEST_COUNT, f"between 0 and {LARGEST_COUNT}"),
            number("threads", lambda n: 0 <= n <= MAX_THREADS, f"between 0 and {MAX_THREADS}"),
            (
                not self.cpu_offload or self.strategy == "zero3",
                f"--cpu_offload needs --strategy zero3, not {self.strategy}",
            ),
            (
                self.deepspeed is None or self.strategy == "ddp",
                f"--deepspeed shards by its own configuration: remove --strategy {self.strategy}",
            ),
            (
                self.deepspeed is None or self.precision in (None, "fp32", "bf16"),
                f"--deepspeed trains in fp32 or bf16: remove --precision {self.precision}",
            ),
            (
                not self.fsdp or (self.strategy == "ddp" and self.deepspeed is None),
                "--fsdp, --deepspeed and --strategy exclude each other: give only one of them",
            ),
            (not self.fsdp or self.precision != "fp16", "--fsdp trains in fp32, bf16 or fp64: remove --precision fp16"),
            (
                not self.dry_run or self.trainer_engine is None,
                "--dry_run plans --strategy: remove --deepspeed or --fsdp",
            ),
            (self.deepspeed != "", "--deepspeed is empty: must name a JSON file"),
            (
                not self.profile or self.trainer_engine is None,
                f"--profile can't divide the steps of {self.trainer_engine}: remove it, or use --strategy",
            ),
            (
                self.ddp_comm_hook == "no" or self.trainer_engine is None,
                f"--ddp_comm_hook {self.ddp_comm_hook} needs --strategy ddp or zero1, not {self.trainer_engine}",
            ),
            (
                self.ddp_comm_hook == "no" or self.strategy in WRAPPED_IN_DDP,
                f"--ddp_comm_hook {self.ddp_comm_hook} needs --strategy ddp or zero1, not {self.strategy}",
            ),
            (
                self.ddp_comm_hook != "power_sgd" or self.precision != "fp16",
                "--ddp_comm_hook power_sgd: an overflow in fp16 would stay in its compression errors: use --precision "
                "bf16 or fp32",
            ),
            (
                self.ddp_comm_hook != "power_sgd" or not self.ddp_find_unused_parameters,
                "--ddp_comm_hook power_sgd needs a gradient of every parameter in every step: it can't be combined "
                "with --ddp_find_unused_parameters",
            ),
            (not self.bf16 or self.precision in (None, "bf16"), f"--bf16 contradicts --precision {self.precision}"),
            (bool(self.text_column and self.label_column), "--text_column and --label_column must each name a column"),
            (
                not self.load_best_model_at_end or (self.validation_size > 0 and self.eval_strategy != "no"),
                "--load_best_model_at_end needs validation rows to choose on, because test rows must not be used: add "
                "--validation_size 0.1 and an --eval_strategy",
            ),
            (self.revision != "", "--revision is empty: must name a branch, tag or commit"),
            (self.output_dir != "", "--output_dir is empty: must name a folder"),
            *(
                (
                    _is_utf8(getattr(self, name)),
                    f"--{name} {getattr(self, name)}: must be valid UTF-8, which safetensors requires",
                )
                for name in ("model", "output_dir", "resume_from_checkpoint", "deepspeed")
            ),
        ]

    @property
    def csv_path(self) -> Path:
        """The CSV file to read: `--csv` if given, otherwise the real reviews if downloaded, otherwise the sample."""
        if self.csv is not None:
            return Path(self.csv)
        return DOWNLOADED_CSV if DOWNLOADED_CSV.exists() else SAMPLE_CSV

    @property
    def trainer_engine(self) -> str | None:
        """The engine that Trainer uses instead of a strategy of this project, or None."""
        return trainer_engine(self.deepspeed, self.fsdp)

    def as_dict(self) -> dict[str, Any]:
        """Return all settings in the order of `settings.json`."""
        return dataclasses.asdict(self)


GROUPS = (
    *(DataSettings, ModelSettings, TrainingSettings, EvaluationSettings),
    *(CheckpointSettings, ProcessSettings, OutputSettings),
)


def trainer_engine(deepspeed: str | None, fsdp: bool | None) -> str | None:
    """Return the engine that `--deepspeed` or `--fsdp` selects, or None without them."""
    if deepspeed is not None:
        return "DeepSpeed"
    return "Trainer's FSDP2" if fsdp else None


# The flags that programs reject, and do not list in their help: all but Trainer's path, and all but the training paths.
TRAINER_ENGINES = dict.fromkeys(("deepspeed", "fsdp"), "only app.trainer_run has it: start that, or use --strategy")
FLAGS_OF_ONE_RUN = TRAINER_ENGINES | {
    "dry_run": "only app.ddp_loop and app.trainer_run have it; app.plan plans all strategies"
}


def refuse_flags(values: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    """Reject flags that a program does not have.

    Args:
        values: of all settings.
        refused: the flags, and why they are rejected.

    Raises:
        UserError: a flag is given.
    """
    for name, reason in refused.items():
        if values[name]:
            raise UserError(f"--{name}: {reason}")


def resolve_train_batch_size(settings: Settings, world_size: int) -> int:
    """Return the global batch size.

    Args:
        settings: If `per_device_train_batch_size` is set, it takes precedence over `train_batch_size`.
        world_size: Number of ranks.

    Raises:
        UserError: The resulting size is too large.
    """
    per_device = settings.per_device_train_batch_size
    if per_device is None:
        return settings.train_batch_size
    size = per_device * world_size * settings.gradient_accumulation_steps
    if size > LARGEST_COUNT:
        raise UserError(
            f"--per_device_train_batch_size {per_device} x {world_size} rank(s) x --gradient_accumulation_steps "
            f"{settings.gradient_accumulation_steps}: must be at most {LARGEST_COUNT} in total"
        )
    return size


def _is_utf8(path: str | None) -> bool:
    """Tell whether a command-line path is valid UTF-8. Python represents other bytes as lone surrogates."""
    return path is None or path == path.encode("utf-8", "ignore").decode()
