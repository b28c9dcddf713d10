"""Ranks that round differently are named, and rows are gathered when they are there."""

from __future__ import annotations

import pytest
import torch

from app.common.machine import arithmetic, describe_mixed
from app.distributed import collectives
from app.distributed.collectives import gather_arithmetic, gather_rows


@pytest.fixture
def tf32(monkeypatch):
    """TF32 is on, as in NVIDIA's containers."""
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


def test_tf32_from_the_environment_is_recorded(world, monkeypatch, tf32):
    monkeypatch.delenv("MKL_CBWR", raising=False)
    facts = gather_arithmetic(world)
    assert facts["fp32_matmul_precision"] == ["high"]
    assert facts["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] == ["1"]
    assert facts["MKL_CBWR"] == ["unset"]


def test_ranks_that_round_differently_are_named_in_one_line(world, monkeypatch):
    mine = arithmetic(world.device)
    others = [mine | {"device": "NVIDIA H100"}, mine | {"device": "NVIDIA A10", "NVIDIA_TF32_OVERRIDE": "0"}]
    equal = gather_arithmetic(world)
    assert describe_mixed(equal) is None
    monkeypatch.setattr(collectives, "all_gather_object", lambda value, world: others)
    mixed = gather_arithmetic(world)
    line = describe_mixed(mixed)
    assert "differ in device (NVIDIA A10, NVIDIA H100), NVIDIA_TF32_OVERRIDE (0, unset): results depend" in line


def test_rows_are_gathered_only_after_the_device_is_done(world, monkeypatch):
    """Copying them would wait for the device without a limit of time."""
    waits = []
    monkeypatch.setattr(collectives, "wait_for_device", waits.append)
    assert gather_rows([1, 0], torch.eye(2, dtype=torch.float64), 2, world=world).tolist() == [[0, 1], [1, 0]]
    assert waits == [world]
