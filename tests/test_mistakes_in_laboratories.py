"""A mistake in the command line of a laboratory is one line with status 2, before anything is measured or written.

tests/launched/test_user_mistakes.py has the mistakes in training and its data, and tests/test_help.py those that are
found before torch is imported.
"""

from __future__ import annotations

import sys

import pytest

from app.bench import scaling, speed
from app.experiments import faults, same_bits
from app.plan import __main__ as plan
from app.program import run_program

PROGRAMS = {"faults": faults, "plan": plan, "same_bits": same_bits, "scaling": scaling, "speed": speed}
MISTAKES = {
    "scaling --ranks 3": "--train_batch_size 32 cannot be divided among 3 ranks",
    "scaling --links fast": "--links: fast",
    "scaling --links 1:-1": "--links: 1:-1",
    "scaling --links 0:1": "--links: 0:1",
    "scaling --steps many": "--steps: many: must be a valid integer",
    "scaling --strategy zero1": "did you mean --strategies?",
    "speed --precision fp16": "--precision fp16",
    "speed --save_steps 5": "unknown argument --save_steps",
    "speed --recipes fast": "--recipes",
    "faults --kills 0": "--kills: 0",
    "faults --ranks -1": "--ranks: -1",
    "faults --csv missing.csv": "missing.csv: no such file",
    "plan --ranks=0": "argument --ranks: 0: must be greater than or equal to 1",
    "plan --ranks=8 --ranks_per_node=3": "--ranks_per_node 3: must divide --ranks 8",
    "plan --ranks=2 --measure --ranks_per_node=1": "--measure: ",
    "plan --device_memory=24": "--device_memory 24: must be a number with a unit, such as 24GiB or 80GB",
    "plan --device_memory=0GiB": "--device_memory 0GiB: must be a number with a unit",
    "plan --csv missing.csv": "missing.csv: no such file",
    "plan --dry_run": "unknown argument --dry_run",
    "same_bits --dry_run": "unknown argument --dry_run",
    "same_bits --strategy=zero1": "did you mean --strategies?",
    "same_bits --ddp_comm_hook=bf16": "--ddp_comm_hook bf16",
    "same_bits --reduce_dtype=bf16": "--reduce_dtype bf16",
    "same_bits --strategies=x": "--strategies",
}


@pytest.mark.parametrize(("command", "line"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_one_line(command, line, monkeypatch, capsys, tmp_path):
    name, *flags = command.split()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *flags])
    assert run_program(PROGRAMS[name].main) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert line in err
    assert not any(tmp_path.iterdir())


def test_a_laboratory_that_starts_its_own_jobs_is_no_rank(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["speed"])
    assert run_program(speed.main) == 2
    assert "it starts jobs itself" in capsys.readouterr().err
