"""Which values and combinations of settings are valid. A mistake is one line that names its flag."""

from __future__ import annotations

import os

import pytest

from app.cli import parse_settings
from app.common.errors import UserError

OUT_OF_RANGE = [
    *("--test_size=0", "--test_size=1", "--test_size=-0.1", "--test_size=nan", "--validation_size=1"),
    *("--max_length=2", "--max_length=-5", "--dropout=1", "--dropout=-0.1", "--train_batch_size=0"),
    *("--gradient_accumulation_steps=0", "--num_train_epochs=0", "--num_train_epochs=inf", "--max_steps=0"),
    *("--max_steps=-2", "--learning_rate=0", "--learning_rate=-1e-3", "--learning_rate=nan", "--warmup_steps=-1"),
    *("--weight_decay=-1", "--adam_beta1=1", "--adam_beta2=1.5", "--adam_epsilon=0", "--max_grad_norm=-1"),
    *("--seed=-1", "--seed=2147483648", "--eval_steps=0", "--eval_batch_size=0", "--threads=-1"),
    *("--logical_ranks=0", "--logical_ranks=-2", "--logical_ranks=4.5", "--logical_ranks=many"),
    *("--strategy=zero4", "--strategy=fsdp", "--activation_checkpointing=perhaps", "--bf16=perhaps"),
    *("--ddp_bucket_cap_mb=0", "--ddp_timeout=0", "--logging_steps=0", "--profile=-1"),
    *("--max_steps=many", "--learning_rate=fast", "--precision=fp8", "--lr_scheduler_type=magic"),
    *("--pad_to_multiple_of=0", "--pad_to_multiple_of=7", "--pad_to_multiple_of=512", "--label_smoothing_factor=1"),
    *(f"--trace_tensors={steps}" for steps in ("", "5", "0:3", "3:2", "1:2:3", "a:b", "-1:2", "1:1e3")),
    *("--csv=", "--cache_dir=", "--model=", "--resume_from_checkpoint="),
    *(f"--{name}={os.fsdecode(b'x/' + bytes([255]))}" for name in ("model", "output_dir", "resume_from_checkpoint")),
    *(f"--class_weights={weights}" for weights in ("", "1,", "0,1", "-1,1", "nan,1", "1,inf", "1e400,1", "Balanced")),
]
CONTRADICTIONS = {
    "--cpu_offload": "--cpu_offload needs --strategy zero3, not ddp",
    "--ddp_comm_hook=bf16 --strategy=zero2": "--ddp_comm_hook bf16 needs --strategy ddp or zero1, not zero2",
    "--ddp_comm_hook=power_sgd --precision=fp16": "remove --precision fp16",
    "--ddp_comm_hook=power_sgd --ddp_find_unused_parameters": "remove --ddp_find_unused_parameters",
    "--param_dtype=bf16 --precision=bf16": "--param_dtype bf16 needs --strategy zero2 or zero3, not ddp",
    "--reduce_dtype=bf16 --strategy=zero1": "--reduce_dtype bf16 needs --strategy zero2 or zero3, not zero1",
    "--param_dtype=bf16 --strategy=zero3 --precision=fp16": "--param_dtype bf16 needs --precision bf16, not fp16",
    "--tf32 --use_cpu": "--tf32 needs GPUs: remove it, or --use_cpu",
    "--early_stopping_patience=2": "--early_stopping_patience needs validation rows",
    "--early_stopping_patience=2 --validation_size=0.1 --eval_strategy=no": "and an --eval_strategy",
    "--early_stopping_patience=0 --validation_size=0.1": "--early_stopping_patience 0: must be greater",
    "--early_stopping_threshold=0.1": "--early_stopping_threshold needs --early_stopping_patience",
}
VALID = [  # tests/launched/test_laws.py trains with most others
    "--param_dtype=bf16 --strategy=zero3 --precision=auto",
    "--ddp_comm_hook=bf16 --strategy=zero1 --ddp_find_unused_parameters --precision=fp16",
    *(f"--max_length=200 --pad_to_multiple_of={multiple}" for multiple in (1, 8, 100)),
    "--model=runs/酒店\\é",
]


def message(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        parse_settings(arguments)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize("flag", OUT_OF_RANGE)
def test_a_value_out_of_range_or_of_the_wrong_type_names_its_flag(flag):
    assert flag.partition("=")[0] in message(flag)


@pytest.mark.parametrize(("flags", "problem"), CONTRADICTIONS.items(), ids=CONTRADICTIONS)
def test_settings_that_exclude_each_other_are_rejected(flags, problem):
    assert problem in message(*flags.split())


@pytest.mark.parametrize("flags", VALID)
def test_all_other_combinations_are_possible(flags):
    parse_settings(flags.split())
