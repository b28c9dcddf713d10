"""The help of every program, and a user's mistakes: at once, before torch is imported, in one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.jobs import LIMIT, PROJECT

from app import program as program_module
from app.__main__ import OTHERS, WITH_RANKS
from app.distributed.environment import SINGLE_PROCESS
from app.program import Program

PROGRAMS = (WITH_RANKS | OTHERS).values()
WITHOUT_SETTINGS = ("predict", "minimal", "bench.growth", "experiments.faults", "data.download")  # of a training
POSITIONAL = {"predict": ["model"]}  # arguments without which the others are not looked at
HEAVY = {"torch", "transformers", "datasets", "sklearn", "scipy", "pandas", "numpy", "matplotlib", "tokenizers"}
RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
RANK_1 |= {"MASTER_PORT": "29500"}


def run(folder: Path, *arguments: str) -> tuple[int, str, list[str], set[str]]:
    """Run `python -m`; return its status, output, lines on standard error, and the names of the imported packages."""
    environment = {name: value for name, value in os.environ.items() if name not in SINGLE_PROCESS}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", *arguments],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    lines = done.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines if line.startswith("import time:")}
    assert "argparse" in imported
    return done.returncode, done.stdout, [line for line in lines if not line.startswith("import time:")], imported


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_and_an_unknown_flag_import_nothing_heavy(tmp_path, program):
    status, out, err, imported = run(tmp_path, f"app.{program}", "--help")
    assert (status, err) == (0, [])
    assert out.startswith(f"usage: python -m app.{program} [--flag VALUE …]\n\n")
    assert f"-m app.{program}" in out.partition("options:")[0].partition("\n")[2], "an example"
    assert ("--learning_rate" in out) == (program not in WITHOUT_SETTINGS)
    assert not re.search(r"default: [^\n]*\(default: ", out), "a default is printed once"
    assert imported & HEAVY == set()
    status, out, err, imported = run(tmp_path, f"app.{program}", *POSITIONAL.get(program, []), "--no_such_flag=1")
    assert (status, out, len(err)) == (2, "", 1)
    assert re.match("error: (unknown argument|unrecognized arguments:) --no_such_flag=1", err[0])
    assert imported & HEAVY == set()


@pytest.mark.parametrize("program", [["app.ddp_loop"], ["app.trainer_run"], ["app.compare"], ["app", "train"]])
@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("--learning_rate=0", "--learning_rate 0: must be greater than 0"),
        ("--config=missing.yaml", "--config missing.yaml: No such file"),
        ("--csv=missing.csv", "missing.csv: no such file"),
    ],
)
def test_a_mistake_imports_nothing_heavy_and_writes_nothing(tmp_path, program, argument, line):
    status, out, err, imported = run(tmp_path, *program, argument)
    assert (status, out, len(err)) == (2, "", 1)
    assert err[0].startswith(f"error: {line}")
    assert imported & HEAVY == set()
    assert not list(tmp_path.iterdir())


def test_importing_the_package_does_nothing():
    code = "import sys; sys.argv = ['-m', '--no-such-flag']; import app; print([m for m in sys.modules if 'app.' in m])"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n")


@pytest.fixture
def check(monkeypatch):
    """Call `check_command_line` on a rank; return the exit status, or None."""
    monkeypatch.setattr(program_module.gc, "disable", lambda: None)
    monkeypatch.setattr(program_module.gc, "set_threshold", lambda *_: None)
    monkeypatch.setattr(program_module.signal, "signal", lambda *_: None)

    def check(*arguments: str, **environment: str) -> int | None:
        for name in SINGLE_PROCESS:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["ddp_loop", *arguments])
        try:
            Program("The description.").check_command_line()
        except SystemExit as exit:
            return int(exit.code or 0)
        return None

    return check


def test_only_rank_0_prints_the_help(check, capsys):
    assert check("--help", **RANK_1) == 0
    assert capsys.readouterr() == ("", "")
    assert check("--help", **RANK_1 | {"RANK": "0", "LOCAL_RANK": "0"}) == 0
    assert "The description." in capsys.readouterr().out


def test_rank_0_reports_a_mistake(check, capsys):
    assert check("--no_such_flag=1", **RANK_1 | SINGLE_PROCESS) == 2
    assert capsys.readouterr().err == "error: unknown argument --no_such_flag=1 (--help lists all flags)\n"
    assert check("--no_such_flag=1", **RANK_1) is None, "torchrun ends it"
    assert capsys.readouterr().err == ""


def test_what_only_some_ranks_may_find_is_left_to_the_program(check, capsys):
    of_two_nodes = RANK_1 | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert check("--csv=missing.csv", **of_two_nodes) is None
    assert check("--local-rank=1", "--max_steps=1", **RANK_1) is None, "torch.distributed.launch adds it"
    assert check("--csv=missing.csv", "--resume_from_checkpoint=auto") is None, "a finished run needs no reviews"
    assert capsys.readouterr() == ("", "")


def test_an_invalid_environment_is_reported(check, capsys):
    assert check(RANK="0") == 2
    assert capsys.readouterr().err.startswith("error: RANK='0', WORLD_SIZE='', ")
