"""docs/tutorial.md: every command, run as printed and in order, and what the page says that it does."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.jobs import LIMIT, PROJECT, read_steps, unavailable, write_subset
from launched.two_nodes import wait_for_all, wait_until

from app.bench.two_nodes import SYSTEM_PATH

pytestmark = [pytest.mark.launched, pytest.mark.slow]
PAGE = (PROJECT / "docs" / "tutorial.md").read_text("utf-8")
ROWS = 700  # of the real reviews, so that the trainings take seconds
DATA = Path("data", "ChnSentiCorp_htl_all.csv")


def commands_of(step: int) -> list[str]:
    """Return the commands of a numbered section, in order."""
    section = PAGE.split(f"\n## {step}. ")[1].split("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    return [command for block in blocks for command in re.split(r"(?<!\\)\n", block.strip())]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory, real_csv: Path) -> Path:
    """A copy of the files of this repository, with its virtual environment and the downloaded reviews."""
    folder = tmp_path_factory.mktemp("tutorial") / "samebits"
    folder.mkdir()
    for name in ("app", "data", "run_scripts", "pyproject.toml", "constraints.txt"):
        copy = shutil.copytree if (PROJECT / name).is_dir() else shutil.copy
        copy(PROJECT / name, folder / name)
    if not (PROJECT / ".venv" / ".setup-stamp").exists():
        unavailable("no .venv of run_scripts/setup.sh")
    (folder / ".venv").mkdir()
    for path in (PROJECT / ".venv").iterdir():
        if path.name != ".setup-stamp":
            (folder / ".venv" / path.name).symlink_to(path)
    # What setup.sh has installed for the repository belongs to this folder: it finds nothing to do.
    _, *state = (PROJECT / ".venv" / ".setup-stamp").read_text().splitlines(keepends=True)
    (folder / ".venv" / ".setup-stamp").write_text("".join([f"{folder.resolve()}\n", *state]))
    shutil.copy(real_csv, folder / DATA)
    return folder


@pytest.fixture(scope="module")
def shell(clone: Path) -> Callable[..., str]:
    """Run a command in the clone, as in a shell in which the virtual environment is active, and return its output."""

    def run(command: str, status: int = 0) -> str:
        job = start(command, clone)
        printed, _ = job.communicate(timeout=LIMIT)
        assert job.returncode == status, f"{command}\n{printed}"
        return printed

    return run


def start(command: str, clone: Path, *prefix: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "GLOO_SOCKET_IFNAME")}
    environment |= {"PATH": f"{clone / '.venv' / 'bin'}:{SYSTEM_PATH}", "HF_HUB_OFFLINE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [*prefix, "bash", "-c", command]
    return subprocess.Popen(command, cwd=clone, env=environment, start_new_session=True, **pipes)


def test_every_command_of_the_tutorial(clone: Path, shell: Callable[..., str], nodes: list[str]) -> None:
    """In one test, because each step uses the files of the ones before."""
    setup, activate, download = commands_of(1)
    assert shell(setup) == "", "the set-up is complete"
    shell(activate)
    assert shell(download).strip() == f"{clone / DATA}: downloaded and verified"
    (clone / DATA).unlink()
    write_subset(Path(os.environ.get("CHNSENTICORP_CSV") or PROJECT / DATA), clone / DATA, ROWS)

    (compare,) = commands_of(2)
    printed = shell(compare)
    assert printed.splitlines()[-1] in PAGE, "bitwise identical"

    report = (clone / re.search(r"Open `(.*?)`", PAGE)[1]).read_text("utf-8")
    for title in re.findall(r"\*([A-Z].*?)\*", PAGE.split("## 3.")[1].split("## 4.")[0]):
        assert f"<h2>{title}</h2>" in report

    train, diff, compare = commands_of(4)
    shell(train)
    lines = [line.split('"')[1] for line in shell(diff, status=1).splitlines() if line.startswith(">")]
    changed = {line for line in lines if "torchelastic" not in line}  # each of the launchers has a line of its own
    assert {name for name in changed if not name.endswith("_dropout")} == {"dropout", "output_dir"}, "as the page says"
    assert shell(compare).splitlines()[-1].startswith("not equal: step 1: the loss is ")

    make, train = commands_of(5)
    shell(make)
    shell(train)
    config = json.loads((clone / "runs/mine/model/config.json").read_text())
    assert config["id2label"] == {"0": "bad", "1": "good"}

    texts, make, predict = commands_of(6)
    header, *lines = csv.reader(line for line in shell(texts).splitlines() if "," in line)
    assert header[-3:-1] == ["probability_bad", "probability_good"]
    assert len(lines) == 2
    shell(make)
    shell(predict)
    with (clone / "new_predictions.csv").open(encoding="utf-8", newline="") as file:
        assert len(list(csv.DictReader(file))) == 100

    train, resume, compare = commands_of(7)
    job, steps = start(train, clone), clone / "runs/interrupted/steps.jsonl"
    wait_until(lambda: steps.exists() and len(read_steps(steps.parent)) >= 5, LIMIT)
    os.killpg(job.pid, signal.SIGINT)  # as Ctrl-C does in a terminal
    printed, _ = job.communicate(timeout=LIMIT)
    assert job.returncode != 0
    assert len(read_steps(steps.parent)) < len(read_steps(clone / "runs/first/ddp_loop")), printed
    assert "resumed from" in shell(resume)
    assert shell(compare).splitlines()[-1].startswith("bitwise identical")

    *jobs, compare = commands_of(8)
    running = [start(job, clone, "ip", "netns", "exec", node) for job, node in zip(jobs, nodes, strict=True)]
    wait_for_all(running, LIMIT)
    printed = [job.communicate(timeout=LIMIT)[0] for job in running]
    assert [job.returncode for job in running] == [0, 0], "\n".join(printed)
    assert shell(compare).splitlines()[-1].startswith("bitwise identical")
