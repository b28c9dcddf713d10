"""How ranks start, wait and leave; GPU behavior is tested with fakes, because the logic needs no GPU."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from app.common.errors import Preempted
from app.distributed import failure, process_group
from app.distributed.collectives import all_gather_object
from app.distributed.process_group import find_device, join
from app.settings import Settings

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
VARIABLES += ("CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS", "TORCHELASTIC_RESTART_COUNT")
BF16, TF32 = {"precision": "bf16"}, {"tf32": True}


@pytest.fixture(autouse=True)
def own_process_state(monkeypatch) -> Iterator[None]:
    """Undo what a process sets only once."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    with torch.backends.cudnn.flags():
        yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cuda.matmul.allow_tf32 = False
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def gpus(monkeypatch) -> SimpleNamespace:
    """The GPUs of this machine: their number, their compute capability, and the calls for them, in order."""
    gpus, real_init = SimpleNamespace(n=1, usable=True, major=7, other=None, calls=[]), dist.init_process_group

    def init(backend, *, timeout, device_id=None, **kwargs):
        gpus.calls.append(("init_process_group", backend, timeout, str(device_id)))
        real_init("gloo", timeout=timeout, **kwargs)

    def set_device(device):
        config = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        gpus.calls.append(("set_device", str(device), config, torch.are_deterministic_algorithms_enabled()))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus.n > 0 and gpus.usable)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus.n)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: gpus.calls.append(("synchronize",)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    # A rank has to ask for its own GPU, which is the last one in these tests.
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: {gpus.n - 1: gpus}[number])
    monkeypatch.setattr(dist, "init_process_group", init)
    return gpus


# ---- start ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one_node", "shared", "restarts", "works"),
    [(True, "True", "3", True), (False, "False", "3", True), (False, "True", "0", True), (False, "True", "3", False)],
)
def test_restarts_on_several_nodes_over_a_shared_store_are_refused(monkeypatch, one_node, shared, restarts, works):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    problem = process_group.problem_of_restarts(one_node)
    assert (problem is None) is works
    assert works or "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in problem


def test_only_the_ranks_of_torchrun_end_with_their_parent(monkeypatch):
    """A shell that started plain Python in the background may end."""
    signals: list[int] = []
    monkeypatch.setattr(process_group, "_prctl_pr_set_pdeathsig", signals.append)
    with join(Settings(use_cpu=True)):
        assert signals == []
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with join(Settings(use_cpu=True)):
        assert signals == [signal.SIGTERM]


@pytest.mark.parametrize(("seconds", "of_nccl"), [(77, 154), (10, 70)])
def test_a_gpu_run_waits_in_gloo_for_ddp_timeout_and_in_nccl_for_longer(gpus, seconds, of_nccl):
    with join(Settings(ddp_timeout=seconds)) as world:
        assert world.device == torch.device("cuda", 0)
        in_gloo = world.control_group._get_backend(torch.device("cpu")).options._timeout
        assert all_gather_object("x", world) == ["x"]
    assert in_gloo == timedelta(seconds=seconds)
    assert gpus.calls[-1] == ("init_process_group", "nccl", timedelta(seconds=of_nccl), "cuda:0")


# ---- what the settings ask of a device --------------------------------------------------------------------------


def test_deterministic_mode_is_set_before_the_gpu_and_nccl_are_initialized(gpus):
    with join(Settings(deterministic=True)):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
        assert not torch.utils.deterministic.fill_uninitialized_memory, "a kernel for each new tensor"
    assert [call[0] for call in gpus.calls] == ["set_device", "init_process_group"]
    assert gpus.calls[0] == ("set_device", "cuda:0", ":4096:8", True)


@pytest.mark.parametrize("tf32", [False, True])
def test_a_gpu_run_has_only_the_numbers_that_it_asks_for(gpus, tf32):
    gpus.major = 8
    with join(Settings(**BF16, tf32=tf32)) as world:
        assert world.device.type == "cuda"
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cuda.matmul.allow_tf32 is tf32
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest"), "recorded as a kernel"


@pytest.mark.parametrize(
    ("machine", "settings", "device", "line"),
    [
        ({"n": 3}, {}, "cuda", None),
        ({"n": 2}, {}, "cuda", r"--nproc_per_node=3: .* has 2 GPU\(s\) and each rank needs one: .* add --use_cpu"),
        ({"n": 8, "usable": False}, {}, "cpu", "cannot use this machine's GPUs: update their driver, or add --use_cpu"),
        ({"n": 0, "other": "xpu"}, {}, "cpu", "XPU devices are not supported, only CUDA GPUs: add --use_cpu"),
        ({"n": 0, "other": "mps"}, {}, "cpu", None),
        ({"n": 0}, {}, "cpu", None),
        ({"n": 3}, BF16, "cuda", r"--precision bf16: cuda:2 \(Tesla T4\) does not support bfloat16: use "),
        ({"n": 3}, TF32, "cuda", r"--tf32: cuda:2 \(Tesla T4\) has no TF32: remove it"),
        ({"n": 0}, TF32, "cpu", "--tf32 needs GPUs, and this job uses CPUs: remove it"),
    ],
)
def test_what_a_device_cannot_do_ends_the_run_instead_of_using_another_device(
    gpus, monkeypatch, machine, settings, device, line
):
    vars(gpus).update(machine)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpus.other is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(gpus.other))
    assert find_device(Settings(use_cpu=True), 2, 3) == ("cpu", None)
    device_type, problem = find_device(Settings(**settings), 2, 3)
    assert device_type == device
    assert (problem is None) if line is None else re.search(line, problem)


# ---- the end ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "status", "begin", "end"),
    [
        (None, 1, "error: rank 0 lost contact", ", outside of training\n"),
        (Preempted("after step 3 of 9"), 75, "stopped: ", "stopped: after step 3 of 9\n"),
    ],
    ids=["a finished run fails", "a stopped run keeps its line and status"],
)
def test_losing_a_rank_that_had_only_to_leave_is_reported(monkeypatch, capsys, outcome, status, begin, end):
    def lose_contact(world):
        raise dist.DistNetworkError("Connection closed by peer")

    monkeypatch.setattr(process_group, "barrier", lose_contact)
    monkeypatch.setattr(failure, "exit_now", sys.exit)
    with pytest.raises(SystemExit) as caught, join(Settings(use_cpu=True)):
        Mock(side_effect=outcome)()
    assert caught.value.code == status
    line = capsys.readouterr().err
    assert line.startswith(begin)
    assert line.endswith(end)
