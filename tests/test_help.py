"""The help of every program, and a user's mistakes: at once, before torch is imported, in one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.jobs import LIMIT, PROJECT

from app.__main__ import OTHERS, WITH_RANKS
from app.distributed.environment import SINGLE_PROCESS

PROGRAMS = (WITH_RANKS | OTHERS).values()
WITHOUT_SETTINGS = ("predict", "minimal", "check", "diff", "experiments.faults", "data.download")  # of a training
POSITIONAL = {"predict": ["model"], "diff": ["a", "b"]}  # arguments without which the others are not looked at
HEAVY = {"torch", "transformers", "datasets", "sklearn", "scipy", "pandas", "numpy", "matplotlib", "tokenizers"}
RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
RANK_1 |= {"MASTER_PORT": "29500"}
RANK_0 = RANK_1 | {"RANK": "0", "LOCAL_RANK": "0"}
RUN_ALL = """
import json, runpy, sys
for sys.argv in json.loads(sys.argv[1]):
    try:
        runpy.run_module(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        print(end.code)
"""
CHECK = "from app.program import Program; Program('The description.').check_command_line(); print('goes on')"


def run(folder: Path, *arguments: str, **environment: str) -> tuple[int, str, list[str], set[str]]:
    """Run Python; return its status, output, lines on standard error, and the names of the imported packages."""
    inherited = {name: value for name, value in os.environ.items() if name not in SINGLE_PROCESS}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        cwd=folder,
        env=inherited | {"PYTHONPATH": str(PROJECT)} | environment,
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
def test_help_imports_nothing_heavy(tmp_path, program):
    status, out, err, imported = run(tmp_path, "-m", f"app.{program}", "--help", PYTHONIOENCODING="ascii")
    assert (status, err) == (0, [])
    assert out.startswith(f"usage: python -m app.{program} [--flag VALUE \\u2026]\n\n")
    assert f"-m app.{program}" in out.partition("options:")[0].partition("\n")[2], "an example"
    assert ("--model MODEL" in out) == (program not in WITHOUT_SETTINGS)
    assert not re.search(r"default: [^\n]*\(default: ", out), "a default is printed once"
    assert imported & HEAVY == set()


def test_an_unknown_flag_is_one_line_of_every_program_and_imports_nothing_heavy(tmp_path):
    command_lines = [[f"app.{name}", *POSITIONAL.get(name, []), "--no_such_flag=1"] for name in PROGRAMS]
    _, out, err, imported = run(tmp_path, "-c", RUN_ALL, json.dumps(command_lines))
    assert out == "2\n" * len(command_lines) == "2\n" * len(err)
    assert all(re.match("error: (unknown argument|unrecognized arguments:) --no_such_flag=1", line) for line in err)
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
    status, out, err, imported = run(tmp_path, "-m", *program, argument)
    assert (status, out, len(err)) == (2, "", 1)
    assert err[0].startswith(f"error: {line}")
    assert imported & HEAVY == set()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "environment", "status", "prints"),
    [
        (["--help"], RANK_0, 0, "The description."),
        (["--help"], RANK_1, 0, ""),
        (["--no_such_flag=1"], RANK_0, 2, "error: unknown argument --no_such_flag=1"),
        # What only some ranks may find is left to `launch`, which tells all of them.
        (["--no_such_flag=1"], RANK_1, 0, "goes on"),  # rank 0 reports it
        (["--csv=missing.csv"], RANK_0 | {"LOCAL_WORLD_SIZE": "1"}, 0, "goes on"),  # the other node may have the file
        (["--csv=missing.csv", "--resume_from_checkpoint=auto"], {}, 0, "goes on"),  # a finished run needs no reviews
        (["--local-rank=1", "--max_steps=1"], RANK_1, 0, "goes on"),  # torch.distributed.launch adds it
        ([], {"RANK": "0"}, 2, "error: RANK='0', WORLD_SIZE='', "),
    ],
)
def test_a_rank_reports_what_all_ranks_find(tmp_path, arguments, environment, status, prints):
    found, out, err, imported = run(tmp_path, "-c", CHECK, *arguments, **environment)
    assert found == status
    assert prints in out + "".join(err)
    assert bool(out + "".join(err)) == bool(prints)
    assert imported & HEAVY == set()
