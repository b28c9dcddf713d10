"""`--help` and a user's mistakes end before torch is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from helpers.jobs import LIMIT, PROJECT

from app import early
from app.distributed.environment import SINGLE_PROCESS

LIGHT = (
    *early.REJECTED,
    *early.WITHOUT_SETTINGS,
    "experiments.same_bits",
    "experiments.faults",
    "data.download",
    "__main__",
)
POSITIONAL = {"predict": ["model"]}  # arguments without which the others are not looked at
HEAVY = {"torch", "transformers", "datasets", "sklearn", "scipy", "pandas", "numpy", "matplotlib", "tokenizers"}
RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
RANK_1 |= {"MASTER_PORT": "29500"}


def run(tmp_path, *arguments: str) -> tuple[int, str, list[str], set[str]]:
    """Run `python -m`; return its status, output, lines on standard error, and the names of the imported packages."""
    environment = {name: value for name, value in os.environ.items() if name not in SINGLE_PROCESS} | {
        "PYTHONPATH": str(PROJECT)
    }
    command = [sys.executable, "-X", "importtime", "-m", *arguments]
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": LIMIT}
    done = subprocess.run(command, check=False, **options)
    lines = done.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines if line.startswith("import time:")}
    assert "argparse" in imported
    return done.returncode, done.stdout, [line for line in lines if not line.startswith("import time:")], imported


@pytest.mark.parametrize("program", LIGHT)
def test_help_imports_nothing_heavy(tmp_path, program):
    status, out, err, imported = run(tmp_path, f"app.{program}", "--help")
    assert (status, err) == (0, [])
    assert "--" in out
    assert imported & HEAVY == set()


@pytest.mark.parametrize("program", sorted({*LIGHT} - {"__main__"}))
def test_an_unknown_flag_imports_nothing_heavy(tmp_path, program):
    status, out, err, imported = run(tmp_path, f"app.{program}", *POSITIONAL.get(program, []), "--colour=red")
    assert (status, out) == (2, "")
    assert len(err) == 1
    assert re.match("error: unknown argument --colour=red", err[0])
    assert imported & HEAVY == set()


@pytest.mark.parametrize("program", [["app.ddp_loop"], ["app.trainer_run"], ["app", "train"]])
@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (["--learning_rate=0"], "--learning_rate 0: must be greater than 0"),
        (["--max_steps", "many"], "--max_steps many: must be a valid integer"),
        (["--config", "missing.yaml"], "--config missing.yaml: No such file"),
        (["--csv", "missing.csv"], "missing.csv: no such file"),
        (["--csv", "."], ".: is a folder; give the path of a CSV file"),
    ],
)
def test_a_mistake_imports_nothing_heavy(tmp_path, program, arguments, mentions):
    status, out, err, imported = run(tmp_path, *program, *arguments)
    assert (status, out) == (2, "")
    assert len(err) == 1
    assert err[0].startswith(f"error: {mentions}")
    assert imported & HEAVY == set()


@pytest.mark.parametrize("program", sorted({*LIGHT} - {"__main__", "check", "bench.scaling", "data.download"}))
def test_a_missing_csv_imports_nothing_heavy(tmp_path, program):
    status, out, err, imported = run(tmp_path, f"app.{program}", *POSITIONAL.get(program, []), "--csv=missing.csv")
    assert (status, out) == (2, "")
    assert len(err) == 1
    assert err[0].startswith("error: ")
    assert err[0].endswith("missing.csv: no such file")
    assert imported & HEAVY == set()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["a", "b", "--csv=none.csv"], ["--sections", "collectives", "--csv=none.csv"]])
def test_reviews_that_are_not_read_are_not_looked_for(start, arguments):
    assert start("compare" if "a" in arguments else "bench.communication", *arguments) is None


@pytest.fixture
def start(monkeypatch):
    """Call `check_command_line` as Python does for a rank that starts a program; return the exit status, or None."""

    def start(program: str, *arguments: str, **environment: str) -> int | None:
        for name in (*SINGLE_PROCESS, "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["-m", *arguments])
        monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "-m", f"app.{program}", *arguments])
        try:
            early.check_command_line()
        except SystemExit as exit:
            return int(exit.code or 0)
        return None

    return start


def test_a_correct_command_line_starts_the_program(start, capsys):
    assert start("ddp_loop", "--max_steps=1") is None
    assert start("bench.memory", "--sizes") is None
    assert start("minimal", "--max_steps=1") is None
    assert start("bench.scaling", "--ranks", "1", "2") is None
    assert capsys.readouterr() == ("", "")


def test_only_rank_0_prints_the_help(start, capsys):
    assert start("ddp_loop", "--help", **RANK_1) == 0
    assert capsys.readouterr() == ("", "")
    assert start("ddp_loop", "--help", **RANK_1 | {"RANK": "0", "LOCAL_RANK": "0"}) == 0
    assert capsys.readouterr().out.startswith("usage: python -m app.ddp_loop [--flag VALUE …]")


def test_rank_0_reports_a_mistake_first(start, capsys, monkeypatch):
    waits = []
    monkeypatch.setattr("app.program.time.sleep", waits.append)
    assert start("ddp_loop", "--colour=red", **RANK_1 | SINGLE_PROCESS) == 2
    assert waits == []
    assert capsys.readouterr().err == "error: unknown argument --colour=red (--help lists all flags)\n"
    assert start("ddp_loop", "--colour=red", **RANK_1) == 2
    assert len(waits) == 1


def test_a_mistake_on_one_of_several_nodes_is_left_to_the_program(start, capsys):
    of_two_nodes = RANK_1 | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert start("ddp_loop", "--csv=missing.csv", **of_two_nodes) is None
    assert capsys.readouterr() == ("", "")


def test_a_finished_run_needs_no_reviews_to_say_so(start):
    assert start("ddp_loop", "--csv=missing.csv", "--resume_from_checkpoint=auto") is None


def test_an_invalid_environment_is_reported(start, capsys):
    assert start("ddp_loop", RANK="0") == 2
    assert capsys.readouterr().err.startswith("error: RANK=0 is set, but WORLD_SIZE is not")
    assert start("ddp_loop", RANK="many") == 2
    assert capsys.readouterr().err.startswith("error: RANK='many': must be a whole number")


@pytest.mark.slow
@pytest.mark.parametrize(("value", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_wait_passively_unless_the_user_decides_otherwise(tmp_path, monkeypatch, value, policy):
    monkeypatch.setenv("OMP_DISPLAY_ENV", "TRUE")  # OpenMP prints its settings when it is loaded
    if value is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", value)
    _, _, err, _ = run(tmp_path, "app.minimal")  # imports torch, and ends because torchrun has not started it
    # scikit-learn has a copy of OpenMP of its own.
    assert {line.partition("'")[2].rstrip("'") for line in err if "OMP_WAIT_POLICY" in line} == {policy}


def test_a_program_without_ranks_ignores_the_variables_of_ranks(start, capsys):
    for program in early.WITHOUT_RANKS:
        assert start(program, RANK="1") is None
        assert start(program, "--colour=red", RANK="many") == 2
        assert capsys.readouterr().err == "error: unknown argument --colour=red (--help lists all flags)\n"
        assert start(program, "--help", RANK="1") == 0
        assert capsys.readouterr().out
