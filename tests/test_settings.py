"""Validation of settings."""

from __future__ import annotations

import os

import pytest

from app.errors import UserError
from app.settings import Settings


@pytest.mark.parametrize("name", ["model", "output_dir", "resume_from_checkpoint"])
def test_a_path_that_is_not_utf8_is_rejected(name):
    with pytest.raises(UserError, match=f"--{name} .*must be valid UTF-8"):
        Settings(**{name: os.fsdecode(b"runs/x\xffy")})
    Settings(**{name: "runs/酒店\n\\é"})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"strategy": "zero2"}, "remove --strategy zero2"),
        ({"fsdp": True}, "--fsdp, --deepspeed and --strategy exclude each other"),
        ({"precision": "fp16"}, "--deepspeed trains in fp32 or bf16: remove --precision fp16"),
        ({"precision": "fp64"}, "remove --precision fp64"),
    ],
)
def test_deepspeed_has_its_own_sharding_and_no_fp16(other, message):
    with pytest.raises(UserError, match=message):
        Settings(deepspeed="ds.json", **other)
    Settings(deepspeed="ds.json", bf16=True)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_only_zero3_can_keep_parameters_in_main_memory(strategy):
    with pytest.raises(UserError, match=f"--cpu_offload needs --strategy zero3, not {strategy}"):
        Settings(strategy=strategy, cpu_offload=True)
    Settings(strategy="zero3", cpu_offload=True)
