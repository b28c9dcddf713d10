"""The settings of a training run, in the groups in which `--help` lists them, with their defaults and valid values.

Names follow `transformers.TrainingArguments`, with one deliberate exception: `train_batch_size` is the *global* batch
size, which is divided among ranks and accumulation steps, so that one process and eight train on the same batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .common.paths import DOWNLOADED_CSV
from .common.valid import LARGEST_COUNT, Rule, above, at_least, between, count, label_names, name_of, number, path_of

TINY = "tiny"
MAX_PROFILED = 1000  # steps: the trace of one has some ten thousand events
MAX_THREADS = 1024  # OpenMP aborts the process if the system cannot provide the requested threads


def setting(default: Any, help: str, valid: Rule | None = None) -> Any:
    """Create a dataclass field.

    Args:
        help: the `--help` text, in which argparse would interpret a bare %.
        valid: the rule for every value but None.
    """
    return field(default=default, metadata={"help": help.replace("%", "%%"), "valid": valid})


@dataclass
class DataSettings:
    _argument_group_name = "data"

    csv: str | None = setting(
        None,
        f"CSV file of reviews; default: {DOWNLOADED_CSV.name} if downloaded, otherwise the bundled sample",
        valid=name_of("a CSV file"),
    )
    text_column: str = setting("review", "column that contains the text", valid=name_of("a column"))
    label_column: str = setting(
        "label", "column that contains the class: two or more distinct integers or strings", valid=name_of("a column")
    )
    label_names: str | None = setting(
        None,
        "names of the classes in the model's config, predictions and reports, such as 0=negative,1=positive; default: "
        "the labels",
        valid=label_names,
    )
    test_size: float = setting(
        0.1,
        "fraction of the rows, between 0 and 1, to hold out as test rows",
        valid=number(lambda x: 0 < x < 1, "a fraction of the rows between 0 and 1, such as 0.1"),
    )
    validation_size: float = setting(
        0.0,
        "fraction of the remaining rows to hold out for monitoring and for choosing the best weights; 0: none",
        valid=at_least(0, below=1, requirement="0 or a fraction of the training rows below 1"),
    )
    max_length: int = setting(
        128,
        "maximum number of tokens per review, including special tokens; longer reviews are truncated",
        valid=count(3, "tokens"),
    )
    pad_to_multiple_of: int = setting(
        1,
        "pad batches to a multiple of so many tokens: fewer different lengths, for which kernels may be faster",
        valid=count(1, "tokens"),
    )
    cache_dir: str = setting(
        "runs/cache",
        "folder of the cache of vocabularies and tokens, which all runs share; safe to delete",
        valid=name_of("a folder"),
    )


@dataclass
class ModelSettings:
    _argument_group_name = "model"

    model: str = setting(
        TINY,
        f"model name on the Hugging Face Hub, local folder, or `{TINY}`: an untrained BERT with 2 layers x 128",
        valid=path_of("a model"),
    )
    revision: str | None = setting(
        None,
        "branch, tag or commit of a model on the Hub; default: its main branch",
        valid=name_of("a branch, tag or commit"),
    )
    dropout: float | None = setting(
        None,
        "dropout probability that replaces every dropout probability in the model's config",
        valid=at_least(0, below=1, requirement="a probability: 0 or more and below 1"),
    )
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"] | None = setting(
        None,
        "attention implementation of transformers; default: eager on CPUs, where it is the fastest with dropout or "
        "bf16, otherwise the model's default",
    )
    trust_remote_code: bool = setting(False, "run Python code from the model's repository; only for authors you trust")


@dataclass
class TrainingSettings:
    _argument_group_name = "training (identical in both training paths)"

    train_batch_size: int = setting(
        32, "global batch size: examples per optimizer step over all ranks and accumulation steps", valid=count()
    )
    per_device_train_batch_size: int | None = setting(
        None, "instead of --train_batch_size: examples per rank and accumulation step", valid=count()
    )
    gradient_accumulation_steps: int = setting(
        1,
        "accumulation steps (micro-batches) per optimizer step, into which the global batch is divided",
        valid=count(),
    )
    logical_ranks: int | None = setting(
        None,
        "equal shares of the global batch, a power of two; every number of ranks that divides it gives bitwise "
        "identical results; default: the number of ranks, or as in the run to resume",
        valid=count(),
    )
    num_train_epochs: float = setting(
        3.0,
        "number of passes over the training rows",
        valid=number(lambda n: 0 < n <= LARGEST_COUNT, f"more than 0 and at most {LARGEST_COUNT}"),
    )
    max_steps: int = setting(
        -1,
        "total number of optimizer steps, overriding --num_train_epochs; -1: not set",
        valid=number(
            lambda n: n == -1 or 1 <= n <= LARGEST_COUNT, f"1 or more and at most {LARGEST_COUNT}, or -1 (not set)"
        ),
    )
    learning_rate: float | None = setting(
        None,
        "peak learning rate; default: 2e-5 for pretrained weights, otherwise 1e-3",
        valid=above(0, "a number above 0, such as 2e-5"),
    )
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = setting(
        "linear", "learning rate schedule after warmup"
    )
    warmup_steps: float = setting(
        0.1, "optimizer steps of linear warmup; a value below 1 is a fraction of all steps", valid=count(0)
    )
    weight_decay: float = setting(
        0.01, "AdamW's weight decay; biases and normalization weights are exempt", valid=at_least(0)
    )
    adam_beta1: float = setting(0.9, "AdamW's beta1", valid=at_least(0, below=1))
    adam_beta2: float = setting(0.999, "AdamW's beta2", valid=at_least(0, below=1))
    adam_epsilon: float = setting(1e-8, "AdamW's epsilon", valid=above(0))
    max_grad_norm: float = setting(1.0, "clip gradients to this global norm; 0: no clipping", valid=at_least(0))
    train_sampling_strategy: Literal["group_by_length", "random"] = setting(
        "group_by_length", "form batches of reviews of similar length (less padding) or of random reviews"
    )
    seed: int = setting(
        42, "seed of the split, the initial weights, the data order and dropout", valid=between(0, LARGEST_COUNT)
    )
    precision: Literal["fp32", "bf16", "fp16", "fp64", "auto"] = setting(
        "fp32",
        "fp32, bf16 or fp16 (autocast; weights stay in fp32; fp16 with loss scaling), fp64 (for numerical checks), or "
        "auto: bf16 on hardware that has instructions for it, otherwise fp32",
    )
    ddp_comm_hook: Literal["no", "fp16", "bf16", "power_sgd"] = setting(
        "no",
        "ddp and zero1: compress the gradients that the ranks exchange, by rounding them to fp16 or bf16, or with "
        "PowerSGD, whose results depend on the number of ranks",
    )
    param_dtype: Literal["fp32", "bf16"] = setting(
        "fp32",
        "zero2 and zero3: gather the parameters, with which the model computes, in fp32, as they are, or rounded to "
        "bf16, which needs --precision bf16; shards, optimizer and checkpoints stay in fp32",
    )
    reduce_dtype: Literal["fp32", "bf16"] = setting(
        "fp32",
        "zero2 and zero3: exchange and sum the gradients of the logical ranks in fp32, as they are, or rounded to bf16",
    )
    tf32: bool = setting(
        False,
        "GPU: multiply fp32 matrices in TF32, which is faster and rounds their elements to 10 bits after the binary "
        "point; needs compute capability 8.0",
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
    eval_steps: int = setting(500, "optimizer steps between evaluations with --eval_strategy steps", valid=count())
    eval_batch_size: int = setting(
        64, "examples per evaluation batch; affects padding, and thereby scores by rounding error", valid=count()
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
    deepspeed: str | None = setting(
        None,
        "trainer_run: train with DeepSpeed's ZeRO as this JSON configuration says; values that the settings "
        'determine are filled in where they are missing or "auto"',
        valid=path_of("a JSON file"),
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


GROUPS = (
    *(DataSettings, ModelSettings, TrainingSettings, EvaluationSettings),
    *(CheckpointSettings, ProcessSettings, OutputSettings),
)
