"""The settings of evaluations, checkpoints, processes and output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..common.valid import at_least, between, count, name_of, names_among, path_of
from .field import setting

MAX_PROFILED = 1000  # steps: the trace of one has some ten thousand events
TRACKERS = ("tensorboard", "trackio", "wandb", "mlflow", "swanlab")
MAX_THREADS = 1024  # OpenMP aborts the process if the system cannot provide the requested threads


@dataclass
class EvaluationSettings:
    _argument_group_name = (
        "evaluation during training, on the validation rows or, without any, on the test rows (for monitoring only)"
    )

    eval_strategy: Literal["epoch", "steps", "no"] = setting("epoch", "when to evaluate")
    eval_steps: int = setting(500, "optimizer steps between evaluations with --eval_strategy steps", valid=count())
    eval_batch_size: int = setting(
        64, "examples per evaluation batch; affects padding, and thereby scores by rounding error", valid=count()
    )
    early_stopping_patience: int | None = setting(
        None,
        "stop training after so many evaluations in a row that did not improve --metric_for_best_model on the "
        "validation rows; default: train all steps",
        valid=count(1, "evaluations"),
    )
    early_stopping_threshold: float = setting(
        0.0, "only an improvement by more than this counts for --early_stopping_patience", valid=at_least(0)
    )


@dataclass
class CheckpointSettings:
    _argument_group_name = "checkpoints and resuming"

    save_strategy: Literal["epoch", "steps", "no"] = setting("epoch", "when to save a checkpoint")
    save_steps: int = setting(500, "optimizer steps between checkpoints with --save_strategy steps", valid=count())
    save_total_limit: int = setting(2, "number of checkpoints to keep; older ones are deleted", valid=count())
    on_save_failure: Literal["continue", "stop"] = setting(
        "continue", "continue or stop training if a checkpoint or log cannot be written, for example on a full disk"
    )
    resume_from_checkpoint: str | None = setting(
        None,
        "checkpoint or run folder to resume from; `auto`: the run in --output_dir or, without it, the latest run",
        valid=path_of("a checkpoint or run folder"),
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
        "state that is sharded over the ranks: none (ddp), the optimizer's (zero1), also gradients, and parameters "
        "between steps (zero2), parameters at any time (zero3); results are bitwise identical",
    )
    cpu_offload: bool = setting(False, "zero3 on GPUs: keep parameters, gradients and optimizer state in main memory")
    activation_checkpointing: bool = setting(
        False, "recompute the activations of each layer in the backward pass to save memory"
    )
    threads: int = setting(
        0,
        "CPU threads per rank, which affect rounding; 0: as in the run to resume, otherwise OMP_NUM_THREADS, otherwise "
        "the node's cores divided by --logical_ranks or, if not set, by its ranks",
        valid=between(0, MAX_THREADS),
    )
    ddp_find_unused_parameters: bool = setting(
        False, "let DDP search for parameters without a gradient in every step (slower; some models require it)"
    )
    ddp_bucket_cap_mb: int | None = setting(
        None, "size of DDP's gradient buckets in MiB; default: PyTorch's", valid=count()
    )
    ddp_timeout: int = setting(1800, "seconds that a rank waits for the others before it fails", valid=count())


@dataclass
class OutputSettings:
    _argument_group_name = "output"

    output_dir: str | None = setting(
        None,
        "folder for the files of the run, which must be new or empty; default: a new folder under runs/",
        valid=path_of("a folder"),
    )
    logging_steps: int = setting(
        10,
        "optimizer steps per logging interval; at its end, losses are averaged over the ranks and logged",
        valid=count(),
    )
    report_to: str = setting(
        "none",
        f"trackers, separated by commas, that also get everything that is logged: {', '.join(TRACKERS)}",
        valid=names_among("none", *TRACKERS),
    )
    project: str = setting("samebits", "project of the trackers", valid=name_of("a project"))
    run_name: str | None = setting(
        None, "name of the run in the trackers; default: training path and folder", valid=name_of("a run")
    )
    disable_tqdm: bool = setting(False, "disable progress bars, which appear only on a terminal")
    dry_run: bool = setting(False, "print the memory and traffic of each rank, and exit before loading weights")
    profile: int = setting(
        0,
        "training steps to profile, after the first four: writes a trace and where the time goes; 0: none",
        valid=between(0, MAX_PROFILED),
    )
    measure_peak_flops: bool = setting(
        False, "measure the matrix multiplication speed of each device before training, to report MFU relative to it"
    )
