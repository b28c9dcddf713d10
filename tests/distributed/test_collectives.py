"""What the ranks of a job tell each other, and how long they wait."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import repeat
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from helpers.worlds import fake_world

from app.common.machine import arithmetic, describe_mixed
from app.distributed import collectives
from app.distributed.collectives import gather_arithmetic, gather_rows, wait_for_device


def test_ranks_that_round_differently_are_named_in_one_line(world, monkeypatch):
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    mine = arithmetic(world.device)
    assert describe_mixed(gather_arithmetic(world)) is None
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")  # with TF32
    ranks = [mine | {"device": "NVIDIA H100"}, arithmetic(world.device) | {"device": "NVIDIA A10"}]
    monkeypatch.setattr(collectives, "all_gather_object", lambda value, world: ranks)
    different = (
        "device (NVIDIA A10, NVIDIA H100), fp32_matmul_precision (high, highest), NVIDIA_TF32_OVERRIDE (0, unset)"
    )
    assert describe_mixed(gather_arithmetic(world)).startswith(f"the ranks differ in {different}: results depend")


def test_waiting_for_the_device_ends_when_it_is_done_or_after_the_timeout(monkeypatch):
    event, gpu = Mock(), fake_world(device="cuda:0")
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    event.query.side_effect = [False, False, True]
    wait_for_device(gpu)
    event.query.side_effect = repeat(False)
    with pytest.raises(dist.DistBackendError, match="did not finish"):
        wait_for_device(replace(gpu, timeout=timedelta(seconds=0.05)))
    wait_for_device(fake_world())  # nothing to wait for


def test_rows_are_gathered_only_after_the_device_is_done(world, monkeypatch):
    """Copying them would wait for the device without a limit of time."""
    waits = []
    monkeypatch.setattr(collectives, "wait_for_device", waits.append)
    assert gather_rows([1, 0], torch.eye(2, dtype=torch.float64), 2, world=world).tolist() == [[0, 1], [1, 0]]
    assert waits == [world]
