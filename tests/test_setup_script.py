"""Test run_scripts/setup.sh without a network: PATH holds only the tools it needs and fake Pythons.

A fake Python runs code with the real interpreter, so that the script's questions get true answers. Creating a virtual
environment and installing packages, which are slow, are a few lines of bash.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.jobs import unavailable
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[1]
TOOLS = ["bash", "cat", "cp", "dirname", "flock", "head", "mkdir", "rm", "sleep"]
INSTALLED_ONCE = ["venv by python3.11", "pip setuptools", "pip .[dev]"]
TOO_OLD = "sys.version_info = (3, 9, 2)"

# $FAKE_PIP is what an installation does: succeed (unset), fail, or run until it is killed.
FAKE_PYTHON = """#!/usr/bin/env bash
case "$1 ${{2:-}}" in
  "-I -c") exec {real} -I -c "import sys; {statement}
$3" "${{@:4}}" ;;
  "--version ") echo "Python {name}" ;;
  "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo "venv by {name}" >>{calls} ;;
  "-m pip")
    echo "pip ${{@: -1}}" >>{calls}
    case "${{FAKE_PIP:-}}" in
      fails) echo "ERROR: No matching distribution found for torch" >&2; exit 1 ;;
      hangs) bash -c 'echo $$ >{calls}.grandchild; exec sleep 60' ;;
      slow) sleep 0.3 ;;
    esac ;;
esac
"""


@dataclass(frozen=True)
class Checkout:
    """A copy of the files that setup.sh reads, and the only folder in its PATH."""

    folder: Path
    path: Path

    @property
    def venv(self) -> Path:
        return self.folder / ".venv"

    @property
    def calls(self) -> list[str]:
        log = self.path / "calls"
        return log.read_text().splitlines() if log.exists() else []

    def add_python(self, name: str = "python3.11", statement: str = "pass") -> Path:
        """Add a fake Python that executes `statement` before any code it is given."""
        program = self.path / name
        program.write_text(
            FAKE_PYTHON.format(real=sys.executable, name=name, statement=statement, calls=self.path / "calls")
        )
        program.chmod(0o755)
        return program

    def add_venv(self, python: Path) -> None:
        """Create a virtual environment as a user would, without setup.sh."""
        (self.venv / "bin").mkdir(parents=True)
        shutil.copy(python, self.venv / "bin" / "python")

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "run_scripts/setup.sh", *arguments],
            cwd=self.folder,
            env={"PATH": str(self.path)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def set_up(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=30)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def start_and_wait_for_pip(self) -> tuple[subprocess.Popen[str], int]:
        """Start a setup whose pip runs until it is killed; return it and the id of a process that pip started."""
        process = self.start(FAKE_PIP="hangs")
        grandchild = self.path / "calls.grandchild"
        wait_until(lambda: grandchild.exists() and grandchild.read_text().endswith("\n"))
        return process, int(grandchild.read_text())


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    folder, path = tmp_path / "a checkout", tmp_path / "bin"
    (folder / "run_scripts").mkdir(parents=True)
    path.mkdir()
    for name in ["pyproject.toml", "constraints.txt", "run_scripts/setup.sh"]:
        shutil.copy(PROJECT / name, folder / name)
    for tool in TOOLS:
        if found := shutil.which(tool):
            (path / tool).symlink_to(found)
    return Checkout(folder, path)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "nothing happened within 20 s"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Return False for a zombie too: its parent may not collect it for a long time."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return state.strip()[:1] not in ("", "Z")


def test_a_second_setup_does_nothing(checkout: Checkout) -> None:
    checkout.add_python()
    first = checkout.set_up()
    assert first.returncode == 0, first.stderr
    assert first.stderr.count("\n") == 1
    assert checkout.calls == INSTALLED_ONCE

    again = checkout.set_up()
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert checkout.calls == INSTALLED_ONCE


def test_deepspeed_is_installed_on_request_and_kept_up_to_date_afterwards(checkout: Checkout) -> None:
    checkout.add_python()
    checkout.set_up()
    assert checkout.set_up("--deepspeed").returncode == 0
    with_deepspeed = ["pip setuptools", "pip .[dev]", "pip .[dev,deepspeed]"]
    assert checkout.calls == [*INSTALLED_ONCE, *with_deepspeed]

    for arguments in ((), ("--deepspeed",)):
        assert checkout.set_up(*arguments).returncode == 0
    assert checkout.calls == [*INSTALLED_ONCE, *with_deepspeed], "nothing to do"
    with (checkout.folder / "constraints.txt").open("a") as file:
        file.write("# another line\n")
    assert checkout.set_up().returncode == 0
    assert checkout.calls == [*INSTALLED_ONCE, *with_deepspeed, *with_deepspeed]


def test_an_unknown_argument_is_refused_before_anything_is_installed(checkout: Checkout) -> None:
    checkout.add_python()
    refused = checkout.set_up("--deepsped")
    assert refused.returncode == 1
    assert refused.stderr == "setup.sh: unknown argument --deepsped: only --deepspeed is possible\n"
    assert checkout.calls == []


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed_into_the_same_venv(checkout: Checkout, changed: str) -> None:
    checkout.add_python()
    checkout.set_up()
    with (checkout.folder / changed).open("a") as file:
        file.write("# another line\n")

    failed = checkout.set_up(FAKE_PIP="fails")
    assert failed.returncode == 1
    assert (checkout.venv / "bin" / "python").exists()
    assert checkout.set_up().returncode == 0  # tried again
    assert checkout.calls == [*INSTALLED_ONCE, "pip setuptools", "pip setuptools", "pip .[dev]"]


@pytest.mark.parametrize(
    "statement",
    [
        "raise SystemExit(127)",
        "sys.version_info = (3, 10, 13)",
        "sys.version_info = (3, 15, 0)",
        "sys.modules['ensurepip'] = None",
        "sys.modules['venv'] = None",
    ],
)
def test_an_unusable_python_is_skipped(checkout: Checkout, statement: str) -> None:
    checkout.add_python("python3.11", statement)
    checkout.add_python("python3")
    assert checkout.set_up().returncode == 0
    assert checkout.calls[0] == "venv by python3"


def test_the_named_python_is_used_if_it_is_usable(checkout: Checkout) -> None:
    checkout.add_python()
    old = checkout.add_python("old-python", TOO_OLD)
    refused = checkout.set_up(PYTHON=str(old))
    assert refused.returncode == 1
    assert str(old) in refused.stderr
    assert not checkout.venv.exists()

    assert checkout.set_up(PYTHON=str(checkout.add_python("my-python"))).returncode == 0
    assert checkout.calls[0] == "venv by my-python"


def test_without_a_usable_python_one_line_says_what_to_install(checkout: Checkout) -> None:
    checkout.add_python("python3", TOO_OLD)
    result = checkout.set_up()
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "no Python 3.11 to 3.14 with venv and ensurepip" in result.stderr
    assert not checkout.venv.exists()


def test_a_failed_installation_leaves_nothing_and_shows_pips_error(checkout: Checkout) -> None:
    checkout.add_python()
    before = sorted(checkout.folder.rglob("*"))
    result = checkout.set_up(FAKE_PIP="fails")
    assert result.returncode == 1
    assert "ERROR: No matching distribution found for torch" in result.stderr
    assert "failed: .venv/bin/python -m pip install" in result.stderr
    assert sorted(checkout.folder.rglob("*")) == before
    assert checkout.set_up().returncode == 0


@pytest.mark.parametrize("pip", ["succeeds", "fails"])
def test_a_users_own_venv_is_installed_into_and_never_removed(checkout: Checkout, pip: str) -> None:
    checkout.add_venv(checkout.add_python())
    assert checkout.set_up(FAKE_PIP=pip).returncode == (pip == "fails")
    assert "venv by python3.11" not in checkout.calls
    assert (checkout.venv / "bin" / "python").exists()


@pytest.mark.parametrize("statement", [TOO_OLD, "sys.modules['pip'] = None"])
def test_a_users_own_venv_that_is_unusable_is_refused(checkout: Checkout, statement: str) -> None:
    checkout.add_python()
    checkout.add_venv(checkout.add_python("theirs", statement))
    result = checkout.set_up()
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "move it away" in result.stderr
    assert (checkout.venv / "bin").exists()
    assert checkout.calls == []


@pytest.mark.parametrize("damage", ["the folder was moved", "the Python was removed"])
def test_a_broken_venv_is_recreated(checkout: Checkout, damage: str) -> None:
    checkout.add_python()
    checkout.set_up()
    (checkout.venv / "old").touch()
    if damage == "the folder was moved":
        checkout = Checkout(checkout.folder.rename(checkout.folder.with_name("moved")), checkout.path)
    else:
        (checkout.venv / "bin" / "python").unlink()

    result = checkout.set_up()
    assert result.returncode == 0
    assert "recreating .venv" in result.stderr
    assert not (checkout.venv / "old").exists()
    assert checkout.calls == 2 * INSTALLED_ONCE


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_setup_leaves_no_venv_and_no_process(checkout: Checkout, number: signal.Signals) -> None:
    checkout.add_python()
    process, grandchild = checkout.start_and_wait_for_pip()
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert "interrupted" in err
    assert not checkout.venv.exists()
    wait_until(lambda: not is_running(grandchild))


def test_a_setup_that_was_killed_is_started_again(checkout: Checkout) -> None:
    checkout.add_python()
    process, grandchild = checkout.start_and_wait_for_pip()
    process.kill()
    os.kill(grandchild, signal.SIGKILL)  # it would hold the lock, as a real pip would
    process.communicate(timeout=20)
    assert checkout.venv.exists()

    result = checkout.set_up()
    assert result.returncode == 0, result.stderr
    assert "recreating .venv" in result.stderr
    assert checkout.calls.count("venv by python3.11") == 2


def test_concurrent_setups_install_once(checkout: Checkout) -> None:
    if shutil.which("flock") is None:
        unavailable("setups wait for each other with flock: install the package util-linux")
    checkout.add_python()
    processes = [checkout.start(FAKE_PIP="slow") for _ in range(3)]
    for process in processes:
        process.communicate(timeout=30)
        assert process.returncode == 0
    assert checkout.calls == INSTALLED_ONCE


def test_every_requirement_is_pinned() -> None:
    """An unpinned requirement would one day install a version that no test has seen."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    requirements = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *(requirement for extra in project["project"]["optional-dependencies"].values() for requirement in extra),
    ]
    lines = (PROJECT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    for requirement in map(Requirement, requirements):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement
