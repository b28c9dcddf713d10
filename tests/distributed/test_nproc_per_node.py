"""How many processes are started by default, and what is said about GPUs that are not used."""

from __future__ import annotations

import re

import pytest
import torch

from app.common.errors import UserError
from app.distributed import process_group
from app.distributed.launcher import resolve_nproc_per_node
from app.settings import Settings


@pytest.fixture
def machine(monkeypatch):
    """Simulate a machine with a number of GPUs: `machine(8)`."""

    def simulate(gpus: int, usable: bool = True, accelerator: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0 and usable)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator is not None)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(accelerator))

    return simulate


@pytest.mark.parametrize(("gpus", "expected"), [(0, 2), (1, 1), (2, 2), (3, 2), (5, 4), (6, 4), (7, 4), (8, 8)])
def test_auto_starts_a_process_per_gpu_as_far_as_the_batch_can_be_divided(machine, gpus, expected):
    machine(gpus)
    assert resolve_nproc_per_node("auto", Settings()) == expected
    assert resolve_nproc_per_node("auto", Settings(use_cpu=True)) == 2


@pytest.mark.parametrize(
    ("changes", "nodes", "expected"),
    [
        ({"train_batch_size": 48}, 1, 6),
        ({"train_batch_size": 48, "gradient_accumulation_steps": 2}, 1, 6),
        ({"train_batch_size": 48, "gradient_accumulation_steps": 4}, 1, 6),
        ({"train_batch_size": 48}, 3, 4),
        ({"per_device_train_batch_size": 5}, 1, 6),
        ({"logical_ranks": 8}, 1, 4),
        ({"logical_ranks": 8}, 4, 2),
        ({"train_batch_size": 7}, 1, 1),
        ({"gradient_accumulation_steps": 5}, 1, 6),  # no number of processes is right: the job says what would be
    ],
)
def test_auto_follows_the_settings_that_divide_the_batch(machine, changes, nodes, expected):
    machine(6)
    assert resolve_nproc_per_node("auto", Settings(**changes), str(nodes)) == expected


def test_each_rank_needs_a_gpu_if_there_are_any(machine):
    machine(2)
    assert process_group.find_device(Settings(), 1, 2) == ("cuda", None)
    assert process_group.find_device(Settings(use_cpu=True), 2, 3) == ("cpu", None)
    _, problem = process_group.find_device(Settings(), 2, 3)
    assert re.search(
        r"--nproc_per_node=3: .* has 2 GPU\(s\) and each rank needs one: start fewer, or add --use_cpu", problem
    )


@pytest.mark.parametrize("value", ["0", "-1", "two", "", "1.5", "９", "1" * 5000])
def test_any_other_number_of_processes_is_one_line(value):
    with pytest.raises(UserError, match=r"--nproc_per_node .*: must be auto or a whole number, 1 or more") as error:
        resolve_nproc_per_node(value, Settings(use_cpu=True))
    assert len(str(error.value)) < 150


@pytest.mark.parametrize(
    ("gpus", "accelerator", "line"),
    [
        (8, None, "PyTorch .* cannot use this machine's GPUs: update their driver, or add --use_cpu"),
        (0, "xpu", "XPU devices are not supported, only CUDA GPUs: add --use_cpu"),
        (0, "mps", None),
        (0, None, None),
    ],
)
def test_a_device_that_cannot_be_used_ends_the_run_instead_of_using_the_cpu(machine, gpus, accelerator, line):
    machine(gpus, usable=False, accelerator=accelerator)
    assert process_group.find_device(Settings(use_cpu=True), 0, 1) == ("cpu", None)
    device_type, problem = process_group.find_device(Settings(), 0, 1)
    assert device_type == "cpu"
    if line is None:
        assert problem is None
        return
    assert re.search(line, problem)
