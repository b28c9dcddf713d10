"""Invalid environment variables are reported in one line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers.jobs import PROJECT, SAMPLE_CSV
from hypothesis import given
from hypothesis import strategies as st

from app.common.errors import UserError
from app.distributed.environment import launcher_id, rank_and_sizes

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
TORCHRUN |= {"MASTER_PORT": "29500"}
NUMBERS = sorted({*TORCHRUN} - {"MASTER_ADDR"})


def problem_with(monkeypatch, variables: dict[str, str]) -> str:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as problem:
        rank_and_sizes()
    assert len(str(problem.value).splitlines()) == 1
    assert len(str(problem.value)) < 300
    return str(problem.value)


@pytest.mark.parametrize("variables", [{}, TORCHRUN, {"WORLD_SIZE": "1"}, {"LOCAL_RANK": "0", "MASTER_ADDR": "a"}])
def test_the_variables_of_torchrun_and_of_plain_python_are_accepted(monkeypatch, variables):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    rank_and_sizes()


@pytest.mark.parametrize("value", ["", " ", "-1", "one", "1.0", "1e3", "²", "9" * 5000, "1\n2", "\x1b[31m"])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_value_that_is_not_a_number_names_its_variable(monkeypatch, name, value):
    assert f"{name}={value[:9]!r}"[:-1] in problem_with(monkeypatch, TORCHRUN | {name: value})


@pytest.mark.parametrize("missing", sorted({*TORCHRUN} - {"RANK"}))
def test_a_rank_without_its_other_variables_is_one_line(monkeypatch, missing):
    variables = {name: value for name, value in TORCHRUN.items() if name != missing}
    assert f"{missing}=''" in problem_with(monkeypatch, variables)


def test_a_rank_beyond_the_world_size_and_a_world_size_without_a_rank_are_one_line(monkeypatch):
    assert "RANK='2', WORLD_SIZE='2'" in problem_with(monkeypatch, TORCHRUN | {"RANK": "2"})
    assert "LOCAL_RANK='2', LOCAL_WORLD_SIZE='2'" in problem_with(monkeypatch, TORCHRUN | {"LOCAL_RANK": "2"})
    assert "RANK='', WORLD_SIZE='2'" in problem_with(monkeypatch, {"WORLD_SIZE": "2"})


TEXTS = st.text(st.characters(exclude_characters="\0", codec="utf-8"))


@given(st.dictionaries(st.sampled_from(sorted(TORCHRUN)), TEXTS))
def test_any_environment_is_accepted_or_a_user_error(variables):
    with pytest.MonkeyPatch.context() as patch:
        for name in TORCHRUN:
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        try:
            rank, size, local_rank, local_size = rank_and_sizes()
        except UserError:
            return
        assert 0 <= rank < size
        assert 0 <= local_rank < local_size


@pytest.mark.launched
def test_only_torchrun_names_a_job_by_its_folder(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/dev/termination-log")  # as a pod of Kubernetes may
    assert launcher_id() is None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/torchelastic_x/none_y/attempt_0/1/error.json")
    assert launcher_id() == "/tmp/torchelastic_x/none_y"


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
