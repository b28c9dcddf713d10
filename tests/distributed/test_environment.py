"""The variables of torchrun name a rank, or are reported in one line. tests/test_help.py has the exit status."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest

from app.common.errors import UserError
from app.distributed.environment import launcher_id, rank_and_sizes

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
TORCHRUN |= {"MASTER_PORT": "29500"}
NUMBERS = sorted({*TORCHRUN} - {"MASTER_ADDR"})
NO_NUMBERS = ("", " ", "-1", "one", "1.0", "1e3", "²", "9" * 5000, "1\n2", "\x1b[31m")


def read(variables: dict[str, str]) -> tuple[int, int, int, int] | str:
    """The rank and sizes that these variables name, or the line that reports them."""
    others = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    with patch.dict(os.environ, others | variables, clear=True):
        try:
            return rank_and_sizes()
        except UserError as error:
            line = str(error)
    assert len(line.splitlines()) == 1
    return line


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "1"}, {"LOCAL_RANK": "0", "MASTER_ADDR": "a"}])
def test_without_a_launcher_there_is_one_rank(variables):
    assert read(TORCHRUN) == (1, 2, 1, 2)
    assert read(variables) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        *((TORCHRUN | {name: no}, f"{name}={no[:9]!r}"[:-1]) for name in NUMBERS for no in NO_NUMBERS),
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR=''"),
        (TORCHRUN | {"RANK": "2"}, "RANK='2', WORLD_SIZE='2'"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK='2', LOCAL_WORLD_SIZE='2'"),
        ({"WORLD_SIZE": "2"}, "RANK='', WORLD_SIZE='2'"),
    ],
)
def test_variables_that_name_no_rank_are_shown_in_a_line(variables, named):
    line = read(variables)
    assert named in line
    assert len(line) < 300
    assert named in read({name: value for name, value in variables.items() if value}), "unset is like empty"


def test_only_torchrun_names_a_job_by_its_folder(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/dev/termination-log")  # as a pod of Kubernetes may
    assert launcher_id() is None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/torchelastic_x/none_y/attempt_0/1/error.json")
    assert launcher_id() == "/tmp/torchelastic_x/none_y"
