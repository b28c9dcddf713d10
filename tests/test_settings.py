"""Validation of settings."""

from __future__ import annotations

import os

import pytest

from app.common.errors import UserError
from app.settings import Settings


@pytest.mark.parametrize("name", ["csv", "cache_dir", "model", "resume_from_checkpoint"])
def test_an_empty_path_is_rejected(name):
    with pytest.raises(UserError, match=f"^--{name} '': must not be empty"):
        Settings(**{name: ""})


@pytest.mark.parametrize("name", ["model", "output_dir", "resume_from_checkpoint"])
def test_a_path_that_is_not_utf8_is_rejected(name):
    with pytest.raises(UserError, match=f"--{name} .*must be valid UTF-8"):
        Settings(**{name: os.fsdecode(b"runs/x\xffy")})
    Settings(**{name: "runs/酒店\n\\é"})


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_only_zero3_can_keep_parameters_in_main_memory(strategy):
    with pytest.raises(UserError, match=f"--cpu_offload needs --strategy zero3, not {strategy}"):
        Settings(strategy=strategy, cpu_offload=True)
    Settings(strategy="zero3", cpu_offload=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"strategy": "zero2", "ddp_comm_hook": "bf16"},
            "--ddp_comm_hook bf16 needs --strategy ddp or zero1, not zero2",
        ),
        ({"strategy": "zero3", "ddp_comm_hook": "power_sgd"}, "power_sgd needs --strategy ddp or zero1, not zero3"),
        (
            {"precision": "fp16", "ddp_comm_hook": "power_sgd"},
            "remove --precision fp16",
        ),
        ({"ddp_find_unused_parameters": True, "ddp_comm_hook": "power_sgd"}, "--ddp_find_unused_parameters"),
    ],
)
def test_gradients_that_cannot_be_compressed_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Settings(**settings)


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype"])
@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({}, "ddp"),
        ({"strategy": "zero1"}, "zero1"),
    ],
)
def test_only_fsdp2_has_precisions_of_its_own(name, settings, chosen):
    with pytest.raises(UserError, match=f"^--{name} bf16 needs --strategy zero2 or zero3, not {chosen}$"):
        Settings(precision="bf16", **settings, **{name: "bf16"})
    Settings(precision="bf16", strategy="zero2", **{name: "bf16"})


def test_parameters_are_gathered_in_bf16_only_where_the_model_computes_in_it():
    for precision in ("fp32", "fp16", "fp64"):
        with pytest.raises(UserError, match=f"^--param_dtype bf16 needs --precision bf16, not {precision}$"):
            Settings(strategy="zero3", param_dtype="bf16", precision=precision)
        Settings(strategy="zero3", reduce_dtype="bf16", precision=precision)
    Settings(strategy="zero3", param_dtype="bf16", precision="auto")


def test_tf32_and_cpus_exclude_each_other():
    with pytest.raises(UserError, match="--tf32 needs GPUs: remove it, or --use_cpu"):
        Settings(tf32=True, use_cpu=True)


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_gradients_can_be_rounded_with_any_precision(hook):
    for precision in ("fp32", "bf16", "fp16", "fp64"):
        Settings(precision=precision, ddp_comm_hook=hook, strategy="zero1", ddp_find_unused_parameters=True)


@pytest.mark.parametrize(
    ("multiple", "valid"), [(1, True), (8, True), (100, True), (7, False), (200, False), (0, False)]
)
def test_no_batch_is_padded_beyond_the_maximum_length(multiple, valid):
    if valid:
        assert Settings(max_length=200, pad_to_multiple_of=multiple).pad_to_multiple_of == multiple
        return
    with pytest.raises(UserError, match=f"--pad_to_multiple_of {multiple}: must"):
        Settings(max_length=100 if multiple == 200 else 200, pad_to_multiple_of=multiple)


@pytest.mark.parametrize("weights", ["", "1,", "0,1", "-1,1", "nan,1", "1,inf", "1e400,1", "Balanced", "1;2"])
def test_class_weights_are_numbers_above_0(weights):
    problem = "must be `balanced`, or one number above 0 per class|could not convert string to float"
    with pytest.raises(UserError, match=f"^--class_weights .*: ({problem})[^\\n]*$"):
        Settings(class_weights=weights)


@pytest.mark.parametrize("weights", ["balanced", "1,2.5", " 1 , 2e-3 ,7"])
def test_class_weights_that_are_valid(weights):
    Settings(class_weights=weights)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"early_stopping_patience": 2}, "--early_stopping_patience needs validation rows to choose on"),
        (
            {"early_stopping_patience": 2, "validation_size": 0.1, "eval_strategy": "no"},
            "add --validation_size 0.1 and an --eval_strategy",
        ),
        ({"early_stopping_patience": 0, "validation_size": 0.1}, "--early_stopping_patience 0: must be greater"),
        ({"early_stopping_threshold": 0.1}, "--early_stopping_threshold needs --early_stopping_patience"),
        ({"label_smoothing_factor": 1}, "--label_smoothing_factor 1: must be less than 1"),
    ],
)
def test_early_stopping_and_smoothing_that_cannot_work_are_rejected(settings, message):
    with pytest.raises(UserError, match=message):
        Settings(**settings)
    Settings(early_stopping_patience=1, early_stopping_threshold=0.1, validation_size=0.1, label_smoothing_factor=0.9)
