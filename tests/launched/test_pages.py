"""README.md, train.md and learn.md: every command, run as printed and in order; and clusters.md's on two nodes.

Not run: what figures.sh runs, because it is in docs/figures.yaml; and commands that clone this repository or download a
model, which test_documents.py only parses.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
from helpers.jobs import LIMIT, PROJECT, read_steps, write_subset
from launched.pages import BLOCK, commands_in_blocks
from launched.two_nodes import wait_for_all, wait_until

from app.bench.two_nodes import ADDRESSES, SYSTEM_PATH
from run_scripts.figures import read_figures

pytestmark = [pytest.mark.launched, pytest.mark.slow]
ROWS = 200  # of the real reviews, so that the trainings take seconds
DATA = Path("data", "ChnSentiCorp_htl_all.csv")
NOT_RUN = re.compile(r"git clone|pip install|bert-base|OWNER")
RESUME = " --resume_from_checkpoint auto"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory, real_csv: Path) -> Path:
    """A copy of this repository with few of the downloaded reviews, whose .venv starts the programs of this one."""
    folder = tmp_path_factory.mktemp("pages") / "samebits"
    (folder / ".venv" / "bin").mkdir(parents=True)
    copied = ("app", "data", "run_scripts", "pyproject.toml", "constraints.txt")
    subprocess.run(["cp", "-R", *(PROJECT / name for name in copied), folder], check=True)
    for name, command in {"python": "python", "torchrun": "torchrun", "samebits": "python -m app"}.items():
        program = folder / ".venv" / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {Path(sys.executable).parent}/{command} "$@"\n')
        program.chmod(0o755)
    (folder / ".venv" / "bin" / "activate").touch()
    state = [f"{folder.resolve()}\n", *((folder / name).read_text() for name in ("pyproject.toml", "constraints.txt"))]
    (folder / ".venv" / ".setup-stamp").write_text("".join([*state, "dev\n"]))  # setup.sh finds nothing to do
    (folder / DATA).unlink(missing_ok=True)
    write_subset(real_csv, folder / DATA, ROWS)
    tickets = pd.read_csv(folder / DATA).set_axis(["category", "text"], axis=1)
    for name in ("tickets.csv", "new_tickets.csv"):
        tickets.to_csv(folder / name, index=False)
    return folder


def start(command: str, clone: Path, *prefix: str) -> subprocess.Popen[str]:
    """Start a command in the clone, as in a shell in which the virtual environment is active."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "GLOO_SOCKET_IFNAME")}
    environment |= {"PATH": f"{clone / '.venv' / 'bin'}:{SYSTEM_PATH}", "HF_HUB_OFFLINE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    shell = [*prefix, "bash", "-c", command]
    return subprocess.Popen(shell, cwd=clone, env=environment, start_new_session=True, **pipes)


def run(command: str, clone: Path) -> str:
    job = start(command, clone)
    printed, _ = job.communicate(timeout=LIMIT)
    assert job.returncode == 0, f"{command}\n{printed}"
    return printed


def interrupt(command: str, clone: Path) -> None:
    """Start a training, and end it as Ctrl-C does in a terminal."""
    job, run = start(command, clone), clone / re.search(r"--output_dir (\S+)", command)[1]
    wait_until(lambda: (run / "steps.jsonl").exists() and len(read_steps(run)) >= 5, LIMIT)
    os.killpg(job.pid, signal.SIGINT)
    printed, _ = job.communicate(timeout=LIMIT)
    assert job.returncode == 75, printed


@pytest.mark.parametrize("name", ["README.md", "docs/train.md", "docs/learn.md"])
def test_every_command_of_a_page(clone: Path, real_csv: Path, name: str) -> None:
    """In one test for a page, because each command uses the files of those before."""
    text = (PROJECT / name).read_text("utf-8")
    measured = {figure["command"] for figure in read_figures().values()}
    printed = ""
    for command, following in pairwise([*commands_in_blocks(text), ""]):
        if command in measured or NOT_RUN.search(command):
            continue
        if command == "samebits download":  # finds the complete file
            shutil.copy(real_csv, clone / DATA)
            assert run(command, clone).strip() == f"{clone / DATA}: downloaded and verified"
            write_subset(real_csv, clone / DATA, ROWS)
        elif following == command + RESUME:
            interrupt(command, clone)
        else:
            printed += run(command, clone)
    assert RESUME not in text or "resumed from" in printed
    if name == "README.md":
        expected = [line for kind, block in BLOCK.findall(text) if not kind for line in block.splitlines()]
        assert expected
        assert all(re.search(re.escape(line).replace("…", ".*"), printed) for line in expected)


def test_the_commands_for_two_nodes_train_the_bits_of_one_node(clone: Path, nodes: list[str]) -> None:
    text = (PROJECT / "docs" / "clusters.md").read_text("utf-8")
    commands = [line for line in commands_in_blocks(text) if line.endswith("multi_node.sh static app.ddp_loop")]
    flags = "--logical_ranks 4 --threads 1 --max_steps 8 --save_strategy no --output_dir"
    here = [re.sub(r"MASTER_ADDR=\S+", f"MASTER_ADDR={ADDRESSES[0]}", command) for command in commands]
    jobs = [
        start(f"{job} {flags} runs/nodes", clone, "ip", "netns", "exec", node)
        for job, node in zip(here, nodes, strict=True)
    ]
    wait_for_all(jobs, LIMIT)
    printed = [job.communicate(timeout=LIMIT)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(printed)
    run(f"samebits train {flags} runs/node", clone)
    run("samebits compare runs/nodes runs/node --assert_equal", clone)
