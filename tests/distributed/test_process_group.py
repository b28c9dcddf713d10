"""How ranks start, wait and leave; GPU behavior is tested with fakes, because the logic needs no GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.worlds import fake_world
from hypothesis import given
from hypothesis import strategies as st

from app.common import machine
from app.common.errors import Preempted
from app.distributed import failure, process_group
from app.distributed.collectives import all_gather_object, wait_for_device
from app.distributed.process_group import Place, common_device_type, join
from app.settings import Settings

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
VARIABLES += ("CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS")
CPU, GPU = Place("host-a", 1, "cpu"), Place("host-b", 1, "cuda")
FULL = Place("host-c", 1, "cuda", "too few GPUs")


@pytest.fixture(autouse=True)
def own_process_state(monkeypatch):
    """Undo what a process sets only once."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    threads, benchmark, deterministic = (
        *(torch.get_num_threads(), torch.backends.cudnn.benchmark),
        torch.backends.cudnn.deterministic,
    )
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, deterministic
    torch.set_num_threads(threads)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def fake_gpu(monkeypatch):
    """Make `join` see one GPU; return the list of calls, in order."""
    calls: list[tuple] = []
    real_init = dist.init_process_group

    def init(backend, *, timeout, device_id=None, **kwargs):
        calls.append(("init_process_group", backend, timeout, str(device_id)))
        real_init("gloo", timeout=timeout, **kwargs)

    def set_device(device):
        config = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        calls.append(("set_device", str(device), config, torch.are_deterministic_algorithms_enabled()))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=7))
    monkeypatch.setattr(dist, "init_process_group", init)
    return calls


# ---- which device -----------------------------------------------------------------------------------------------


def test_ranks_with_the_same_device_type_use_it():
    assert common_device_type([GPU, GPU], 1) == ("cuda", None)
    assert common_device_type([CPU, CPU], 0) == ("cpu", None)


def test_if_a_rank_has_a_problem_all_ranks_use_the_cpu_to_report_it():
    ranks = [GPU, FULL, CPU]
    assert [common_device_type(ranks, rank) for rank in range(3)] == [
        ("cpu", None),
        ("cpu", "too few GPUs"),
        ("cpu", None),
    ]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_without_a_gpu_are_named_on_every_rank_if_others_have_one(rank):
    device_type, problem = common_device_type([GPU, CPU, GPU], rank)
    assert device_type == "cpu"
    assert problem is not None
    assert "rank(s) 1 (host-a)" in problem
    assert "--use_cpu" in problem


@given(st.lists(st.sampled_from([CPU, GPU, FULL]), min_size=1, max_size=6))
def test_every_rank_chooses_the_same_device_type(ranks):
    chosen = {common_device_type(ranks, rank)[0] for rank in range(len(ranks))}
    assert len(chosen) == 1
    if chosen == {"cuda"}:
        assert ranks == [GPU] * len(ranks)


# ---- restarts ----------------------------------------------------------------------------------------------------


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
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    with join(Settings(use_cpu=True)):
        assert signals == []
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with join(Settings(use_cpu=True)):
        assert signals == [signal.SIGTERM]


# ---- timeouts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "of_nccl"), [(77, 154), (10, 70)])
def test_a_gpu_run_waits_in_gloo_for_ddp_timeout_and_in_nccl_for_longer(fake_gpu, seconds, of_nccl):
    with join(Settings(ddp_timeout=seconds)) as world:
        assert world.device == torch.device("cuda", 0)
        control = world.control_group
        assert control is not None
        assert control._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=seconds)
        assert all_gather_object("x", world) == ["x"]
    name, backend, timeout, device = fake_gpu[-1]
    assert (name, backend, device) == ("init_process_group", "nccl", "cuda:0")
    assert timeout == timedelta(seconds=of_nccl)


class FakeEvent:
    """A CUDA event that completes after some queries."""

    remaining = 0

    def record(self) -> None:
        pass

    def query(self) -> bool:
        FakeEvent.remaining -= 1
        return FakeEvent.remaining < 0


def test_waiting_for_the_device_ends_when_it_is_done_or_after_the_timeout(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    gpu = replace(fake_world(device="cuda:0"), timeout=timedelta(seconds=0.05))
    FakeEvent.remaining = 3
    wait_for_device(gpu)
    FakeEvent.remaining = 10**9
    with pytest.raises(dist.DistBackendError, match="did not finish"):
        wait_for_device(gpu)
    wait_for_device(fake_world())  # nothing to wait for


def test_no_interface_is_chosen_on_one_node(fake_gpu, monkeypatch):
    monkeypatch.setattr(process_group, "use_reachable_interface", lambda: pytest.fail("chosen"))
    with join(Settings()) as world:
        assert world.size == world.local_size == 1


# ---- determinism ------------------------------------------------------------------------------------------------


def test_deterministic_mode_is_set_before_the_gpu_and_nccl_are_initialized(fake_gpu):
    with join(Settings(deterministic=True)):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
        assert not torch.utils.deterministic.fill_uninitialized_memory, "a kernel for each new tensor"
    assert [call[0] for call in fake_gpu] == ["set_device", "init_process_group"]
    assert fake_gpu[0] == ("set_device", "cuda:0", ":4096:8", True)


@pytest.mark.parametrize("settings", [Settings(), Settings(deterministic=True, use_cpu=True)])
def test_other_runs_do_not_enter_deterministic_mode(fake_gpu, settings):
    with join(settings):
        assert not torch.are_deterministic_algorithms_enabled()
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


# ---- bf16 -------------------------------------------------------------------------------------------------------


def test_bf16_on_a_gpu_that_would_emulate_it_is_refused(fake_gpu, capsys):
    with pytest.raises(SystemExit) as caught, join(Settings(precision="bf16")):
        pytest.fail("joined")
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cuda:0 (Tesla T4)" in line
    assert "use --precision fp16 or fp32" in line


@pytest.mark.parametrize(("major", "use_cpu"), [(8, False), (7, True)])
def test_bf16_is_accepted_on_gpus_that_support_it_and_on_cpus(fake_gpu, monkeypatch, major, use_cpu):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
    with join(Settings(precision="bf16", use_cpu=use_cpu)) as world:
        assert world.device.type == ("cpu" if use_cpu else "cuda")


# ---- TF32 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("major", "variables", "message"),
    [
        (7, {}, "--tf32: cuda:0 (Tesla T4) has no TF32: remove it"),
        (None, {}, "--tf32 needs GPUs, and this job uses CPUs: remove it"),
    ],
)
def test_tf32_where_there_is_none_is_refused_with_one_line(fake_gpu, monkeypatch, capsys, major, variables, message):
    if major is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught, join(Settings(tf32=True)):
        pytest.fail("joined")
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_is_used_only_if_requested(fake_gpu, monkeypatch, tf32):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=8))
    with join(Settings(tf32=tf32)):
        assert torch.backends.cuda.matmul.allow_tf32 is tf32
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest"), "recorded as a kernel"


# ---- the end ----------------------------------------------------------------------------------------------------


def test_leaving_does_not_create_a_cuda_context(monkeypatch):
    def no_memory() -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", no_memory)
    with join(Settings(use_cpu=True)):
        pass
    assert not dist.is_initialized()


@pytest.mark.gpu
def test_on_a_real_gpu_the_same_attention_step_has_the_same_bits():
    machine.use_deterministic_algorithms()

    def gradient() -> torch.Tensor:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(256, 8, batch_first=True, device="cuda")
        table = torch.nn.Embedding(50, 256, device="cuda")
        layer(table(torch.randint(50, (64, 128), device="cuda"))).square().sum().backward()
        return torch.cat([p.grad.flatten() for m in (layer, table) for p in m.parameters()])

    first = gradient()
    assert all(torch.equal(first, gradient()) for _ in range(5))


@pytest.mark.gpu
def test_a_cpu_run_leaves_a_real_gpu_alone():
    code = (
        "import torch; from app.distributed.process_group import join; from app.settings import Settings\n"
        "with join(Settings(use_cpu=True)): pass\n"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.fixture
def lost_at_barrier(monkeypatch):
    """Let every barrier lose contact with another rank, and an exit at once raise `SystemExit`."""

    def lose_contact(world):
        raise dist.DistNetworkError("Connection closed by peer")

    def leave(status):
        raise SystemExit(status)

    monkeypatch.setattr(process_group, "barrier", lose_contact)
    monkeypatch.setattr(failure, "exit_now", leave)


def test_losing_a_rank_that_had_only_to_leave_is_reported(lost_at_barrier, capsys):
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit), join(Settings(use_cpu=True)):
            pass
    finally:
        signal.signal(signal.SIGTERM, handler)
    line = capsys.readouterr().err
    assert line.startswith("error: rank 0 lost contact")
    assert line.endswith(", outside of training\n")


def test_a_stopped_run_keeps_its_line_and_status_if_another_rank_is_killed_meanwhile(lost_at_barrier, capsys):
    with pytest.raises(SystemExit) as caught, join(Settings(use_cpu=True)):
        raise Preempted("after step 3 of 9")
    assert caught.value.code == 75
    assert capsys.readouterr().err == "stopped: after step 3 of 9\n"
