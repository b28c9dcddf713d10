"""Invalid environment variables are reported in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from helpers.jobs import PROJECT, SAMPLE_CSV
from hypothesis import given
from hypothesis import strategies as st

from app.common.errors import UserError
from app.distributed import environment
from app.distributed.environment import (
    LOWEST,
    NEEDED_BY_RANK,
    check_accelerate_environment,
    check_environment,
    check_local_rank,
    default_threads,
    requested_threads,
    split_off_local_rank,
)

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
TORCHRUN |= {"MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "0"}


def problem_with(monkeypatch, variables: dict[str, str]) -> str:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as problem:
        check_environment()
    assert len(str(problem.value).splitlines()) == 1
    assert len(str(problem.value)) < 200
    return str(problem.value)


@pytest.mark.parametrize("variables", [{}, TORCHRUN, {"WORLD_SIZE": "1"}, {"LOCAL_RANK": "0", "MASTER_ADDR": "a"}])
def test_the_variables_of_torchrun_and_of_plain_python_are_accepted(monkeypatch, variables):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check_environment()


@pytest.mark.parametrize("value", ["", " ", "-1", "one", "1.0", "1e3", "²", "١", "9" * 5000, "1\n2", "\x1b[31m"])
@pytest.mark.parametrize("name", LOWEST)
def test_a_value_that_is_not_a_number_names_its_variable(monkeypatch, name, value):
    assert name in problem_with(monkeypatch, TORCHRUN | {name: value})


@pytest.mark.parametrize("missing", NEEDED_BY_RANK)
def test_a_rank_without_its_other_variables_is_one_line(monkeypatch, missing):
    variables = {name: value for name, value in TORCHRUN.items() if name != missing}
    assert f"{missing} is not" in problem_with(monkeypatch, variables)


def test_a_rank_beyond_the_world_size_and_a_world_size_without_a_rank_are_one_line(monkeypatch):
    assert "RANK=2" in problem_with(monkeypatch, TORCHRUN | {"RANK": "2"})
    assert problem_with(monkeypatch, TORCHRUN | {"LOCAL_RANK": "2"}).startswith("LOCAL_RANK=2: must be less")
    assert "RANK is not" in problem_with(monkeypatch, {"WORLD_SIZE": "2"})


TEXTS = st.text(st.characters(exclude_characters="\0", codec="utf-8"))


@given(st.dictionaries(st.sampled_from(sorted(TORCHRUN)), TEXTS))
def test_any_environment_is_accepted_or_a_user_error(variables):
    with pytest.MonkeyPatch.context() as patch:
        for name in TORCHRUN:
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        try:
            check_environment()
        except UserError:
            return
        assert all(int(os.environ[name]) >= lowest for name, lowest in LOWEST.items() if name in variables)


@pytest.mark.launched
def test_an_entry_point_prints_one_line(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    done = subprocess.run(
        [sys.executable, "-m", "app.ddp_loop", "--csv", SAMPLE_CSV],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(PROJECT), "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "WORLD_SIZE" in line


# ---- variables that accelerate launch exports ------------------------------------------------------------------------

PLAIN_ACCELERATE_LAUNCH = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
    "ACCELERATE_USE_CPU": "False",
}


@pytest.fixture
def accelerate_environment(monkeypatch):
    """Replace all variables of accelerate, and pretend that there is or is not a GPU."""

    def replace(variables: dict[str, str], has_gpu: bool = False) -> None:
        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)

    return replace


@pytest.mark.parametrize(
    ("variables", "settings", "has_gpu"),
    [
        ({}, {}, True),
        (PLAIN_ACCELERATE_LAUNCH, {}, True),
        (PLAIN_ACCELERATE_LAUNCH, {"use_cpu": True}, True),
        (
            PLAIN_ACCELERATE_LAUNCH,
            {"precision": "bf16"},
            True,
        ),  # TrainingArguments(bf16=True) overrides "no"
        (PLAIN_ACCELERATE_LAUNCH, {"precision": "fp64"}, True),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"precision": "bf16"}, True),
        ({"ACCELERATE_USE_CPU": "True"}, {"use_cpu": True}, True),
        ({"ACCELERATE_USE_CPU": "True"}, {}, False),
        ({"ACCELERATE_TORCH_DEVICE": "cpu"}, {"use_cpu": True}, True),
        ({"ACCELERATE_USE_FSDP": "false", "ACCELERATE_USE_DEEPSPEED": "0"}, {}, True),
        ({"ACCELERATE_LOG_LEVEL": "info", "ACCELERATE_DEBUG_MODE": "true"}, {}, True),
    ],
)
def test_accelerate_variables_that_agree_or_have_no_effect_are_accepted(
    accelerate_environment, variables, settings, has_gpu
):
    accelerate_environment(variables, has_gpu)
    check_accelerate_environment(**{"precision": "fp32", "use_cpu": False} | settings)


@pytest.mark.parametrize(
    ("name", "value", "settings", "remedy"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16", {}, "add --precision bf16, or unset it"),
        ("ACCELERATE_MIXED_PRECISION", "bf16", {"precision": "fp64"}, "add --precision bf16, or unset it"),
        ("ACCELERATE_MIXED_PRECISION", "fp16", {}, "unset it, and use --precision"),
        ("ACCELERATE_MIXED_PRECISION", "fp16", {"precision": "bf16"}, "unset it, and use --precision"),
        (
            "ACCELERATE_MIXED_PRECISION",
            "fp16",
            {"precision": "fp16"},
            "unset it: --precision fp16 scales the loss itself",
        ),
        ("ACCELERATE_MIXED_PRECISION", "fp8", {}, "unset it, and use --precision"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", {}, "unset it"),
        ("ACCELERATE_DYNAMO_USE_DYNAMIC", "perhaps", {}, "unset it"),
        ("ACCELERATE_USE_FSDP", "true", {}, "unset it, and use --strategy"),
        ("ACCELERATE_USE_DEEPSPEED", "1", {}, "unset it, and use --strategy"),
        ("ACCELERATE_USE_MEGATRON_LM", "True", {}, "unset it"),
        ("ACCELERATE_USE_CPU", "True", {}, "add --use_cpu, or unset it"),
        ("ACCELERATE_USE_CPU", "", {}, "must be true or false"),
        ("ACCELERATE_TORCH_DEVICE", "cuda:1", {}, "CUDA_VISIBLE_DEVICES"),
        ("ACCELERATE_TORCH_DEVICE", "cuda:0", {"use_cpu": True}, "unset it"),
    ],
)
def test_an_accelerate_variable_that_contradicts_the_settings_is_rejected(
    accelerate_environment, name, value, settings, remedy
):
    accelerate_environment(PLAIN_ACCELERATE_LAUNCH | {name: value}, has_gpu=True)
    with pytest.raises(UserError) as problem:
        check_accelerate_environment(**{"precision": "fp32", "use_cpu": False} | settings)
    message = str(problem.value)
    assert message.startswith(f"{name}=")
    assert value in message
    assert remedy in message
    assert len(message.splitlines()) == 1


def test_the_local_rank_that_torch_distributed_launch_passes(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    own, added = split_off_local_rank(["--local-rank=1", "--csv", "--local_rank", "--local_rank=0"])
    assert own == ["--csv", "--local_rank"]
    check_local_rank(added[:1])
    with pytest.raises(UserError, match="--local_rank=0: LOCAL_RANK is 1"):
        check_local_rank(added)
    monkeypatch.delenv("LOCAL_RANK")
    check_local_rank(["--local_rank=0"])
    for value in ("1", "-1", "", "x\n" * 500):
        with pytest.raises(UserError) as problem:
            check_local_rank([f"--local_rank={value}"])
        assert len(str(problem.value)) < 200


@pytest.fixture
def started_with(monkeypatch):
    """Set the variables with which this process (`own`) and the process that started it (`launcher`) were started."""

    def start(own: dict[str, str], launcher: dict[str, str], **changed: str) -> None:
        environments = {None: own, os.getppid(): launcher}
        process = lambda pid: SimpleNamespace(environ=lambda: environments[pid])  # noqa: E731
        monkeypatch.setattr(environment.psutil, "Process", process)
        for name in ("TORCHELASTIC_RESTART_COUNT", "ACCELERATE_MIXED_PRECISION", "OMP_NUM_THREADS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in changed.items():
            monkeypatch.setenv(name, value)

    monkeypatch.setattr(environment, "cores_of_node", lambda: 8)
    return start


def test_a_users_number_of_threads_is_distinguished_from_torchruns(started_with):
    by_torchrun = {"TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1"}
    started_with(by_torchrun, {}, **by_torchrun)
    assert default_threads(2) == 4
    started_with(by_torchrun, {"OMP_NUM_THREADS": "1"}, **by_torchrun)
    assert default_threads(2) == 1
    by_accelerate = {"ACCELERATE_MIXED_PRECISION": "no", "OMP_NUM_THREADS": "1"}
    started_with(by_accelerate, {}, **by_accelerate)
    assert default_threads(2) == 4
    started_with({"OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "5"})
    assert default_threads(2) == 3
    started_with({}, {"OMP_NUM_THREADS": "5"}, OMP_NUM_THREADS="2")  # set by an earlier `join` of this process
    assert default_threads(16) == 1


@pytest.mark.parametrize(("value", "threads"), [("", None), ("6", 6), ("1024", 1024), (" 4,2 ", 4)])
def test_numbers_that_openmp_accepts_are_honored(started_with, value, threads):
    started_with({"OMP_NUM_THREADS": value}, {})
    assert requested_threads() == threads


@pytest.mark.parametrize("value", ["0", "-1", "1025", "many", " ", "²", "9" * 5000, "1\n2", "\x1b[31m"])
def test_another_number_of_threads_is_one_line(started_with, value):
    started_with({"OMP_NUM_THREADS": value}, {})
    with pytest.raises(UserError, match=r"must be a whole number between 1 and 1024$") as problem:
        requested_threads()
    assert len(str(problem.value).splitlines()) == 1


def test_an_environment_that_cannot_be_read_is_no_request(monkeypatch):
    def denied(pid):
        raise psutil.AccessDenied(pid)

    monkeypatch.setattr(environment.psutil, "Process", denied)
    assert requested_threads() is None
