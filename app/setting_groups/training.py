"""The settings of the model and of training, which are identical in both training paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..common.valid import LARGEST_COUNT, above, at_least, between, class_weights, count, name_of, number, path_of
from .built_in import TINY, TINY_BERT, describe_default
from .field import setting


@dataclass
class ModelSettings:
    _argument_group_name = "model"

    model: str = setting(
        TINY,
        f"model name on the Hugging Face Hub, local folder, or an untrained model that needs no download: `{TINY}`, a "
        f"ModernBERT with one layer, or `{TINY_BERT}`, a BERT with 2 layers x 128",
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
        None,
        f"number of passes over the training rows; {describe_default('num_train_epochs')}",
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
    class_weights: str | None = setting(
        None,
        "weight of each class in the training loss: `balanced` (inversely proportional to its training rows), or one "
        "number per class, such as 1,2.5, in the order of the labels; normalized over the global batch",
        valid=class_weights,
    )
    label_smoothing_factor: float = setting(
        0.0,
        "share of each training label that is divided among all classes; evaluations do not smooth",
        valid=at_least(0, below=1, requirement="0 or more and below 1"),
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
