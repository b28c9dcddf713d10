"""Invalid environment variables are reported in one line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import PROJECT, SAMPLE_CSV

from app.distributed.environment import LOWEST, NEEDED_BY_RANK, check_environment
from app.errors import UserError

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
@pytest.mark.parametrize("variables", [{"RANK": ""}, {"WORLD_SIZE": "2"}])
def test_an_entry_point_prints_one_line(tmp_path, variables):
    environment = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    done = subprocess.run(
        [sys.executable, "-m", "app.ddp_loop", "--csv", SAMPLE_CSV],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(PROJECT)} | variables,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert next(iter(variables)) in line
