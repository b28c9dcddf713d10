"""run_scripts/setup.sh without a network: PATH holds nothing but the few tools it uses and Pythons that are fakes.

A fake is this test's own interpreter where it is asked to run code, so that the script's questions get true answers,
and a few lines of bash where it is asked to make a venv or to install: what the real ones do slowly.
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
from jobs import unavailable
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[1]
TOOLS = ["bash", "cat", "cp", "dirname", "flock", "head", "mkdir", "mktemp", "rm", "sleep", "tail"]

# $FAKE_PIP says what an installation does: works, fails, or goes on until it is ended.
FAKE_PYTHON = """#!/usr/bin/env bash
case "$1 ${{2:-}}" in
  "-I -c") exec {real} -I -c "import sys; {pretend}
$3" "${{@:4}}" ;;
  "--version ") echo "Python {name}" ;;
  "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo "venv by {name}" >>{calls} ;;
  "-m pip")
    echo "pip ${{@: -1}}" >>{calls}
    case "${{FAKE_PIP:-works}}" in
      fails) echo "ERROR: No matching distribution found for torch" >&2; exit 1 ;;
      hangs) sleep 60 & echo $! >{calls}.grandchild; wait ;;
      slow) sleep 0.5 ;;
    esac ;;
esac
"""


@dataclass(frozen=True)
class Checkout:
    """A copy of what setup.sh reads, and the PATH that it is let to see."""

    folder: Path
    path: Path

    @property
    def venv(self) -> Path:
        return self.folder / ".venv"

    @property
    def stamp(self) -> Path:
        return self.venv / ".setup-stamp"

    @property
    def calls(self) -> list[str]:
        """What the fakes did so far."""
        log = self.path / "calls"
        return log.read_text().splitlines() if log.exists() else []

    def add_python(self, name: str, pretend: str = "") -> Path:
        """A fake Python that runs the statement `pretend` before the code it is given."""
        return self.add(
            name, FAKE_PYTHON.format(real=sys.executable, name=name, pretend=pretend, calls=self.path / "calls")
        )

    def add(self, name: str, script: str) -> Path:
        program = self.path / name
        program.write_text(script)
        program.chmod(0o755)
        return program

    def start(self, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "run_scripts/setup.sh"],
            cwd=self.folder,
            env={"PATH": str(self.path), "TMPDIR": str(self.path)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def set_up(self, **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(**environment)
        out, err = process.communicate(timeout=30)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


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
        assert time.monotonic() < deadline, "waited 20 s in vain"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """False for a zombie too: it may wait long for a parent that collects it."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return state.strip()[:1] not in ("", "Z")


def scratch_folders(checkout: Checkout) -> list[Path]:
    return list(checkout.path.glob("tmp.*"))


def test_sets_up_once_and_then_does_nothing(checkout: Checkout) -> None:
    checkout.add_python("python3.11")

    first = checkout.set_up()
    assert first.returncode == 0, first.stderr
    assert first.stderr.count("\n") == 1
    assert "setting up .venv with Python python3.11" in first.stderr
    assert checkout.calls == ["venv by python3.11", "pip setuptools", "pip .[dev]"]

    again = checkout.set_up()
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert len(checkout.calls) == 3
    assert scratch_folders(checkout) == []


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_a_change_of_the_pins_updates_in_place(checkout: Checkout, changed: str) -> None:
    checkout.add_python("python3.11")
    checkout.set_up()
    (checkout.venv / "mine").touch()
    (checkout.folder / changed).write_text((PROJECT / changed).read_text() + "# one line more\n")

    assert checkout.set_up().returncode == 0
    assert checkout.calls.count("venv by python3.11") == 1
    assert checkout.calls.count("pip .[dev]") == 2
    assert (checkout.venv / "mine").exists()


@pytest.mark.parametrize(
    "pretend",
    [
        "raise SystemExit(127)",
        "sys.version_info = (3, 10, 13)",
        "sys.version_info = (3, 15, 0)",
        "sys.modules['ensurepip'] = None",
        "sys.modules['venv'] = None",
    ],
)
def test_passes_over_a_python_that_does_not_suit(checkout: Checkout, pretend: str) -> None:
    checkout.add_python("python3.11", pretend)
    checkout.add_python("python3")
    assert checkout.set_up().returncode == 0
    assert checkout.calls[0] == "venv by python3"


def test_prefers_the_tested_python(checkout: Checkout) -> None:
    for name in ["python", "python3", "python3.13", "python3.12", "python3.11"]:
        checkout.add_python(name)
    checkout.set_up()
    assert checkout.calls[0] == "venv by python3.11"


def test_takes_the_named_python(checkout: Checkout) -> None:
    checkout.add_python("python3.11")
    checkout.set_up(PYTHON=str(checkout.add_python("my-python")))
    assert checkout.calls[0] == "venv by my-python"


def test_no_python_that_suits_is_one_line_and_leaves_nothing(checkout: Checkout) -> None:
    checkout.add("python3.12", "#!/usr/bin/env bash\necho 'pyenv: python3.12: command not found' >&2; exit 127\n")
    checkout.add_python("python3", "sys.version_info = (3, 9, 2)")

    result = checkout.set_up()
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "no Python 3.11 to 3.14 with venv and ensurepip" in result.stderr
    assert "PYTHON=" in result.stderr
    assert not checkout.venv.exists()


def test_a_named_python_that_does_not_suit_is_named_in_the_error(checkout: Checkout) -> None:
    checkout.add_python("python3.11")
    old = checkout.add_python("old-python", "sys.version_info = (3, 9, 2)")
    result = checkout.set_up(PYTHON=str(old))
    assert result.returncode == 1
    assert str(old) in result.stderr
    assert not checkout.venv.exists()


def test_a_failed_install_says_what_failed_and_leaves_nothing(checkout: Checkout) -> None:
    checkout.add_python("python3.11")
    before = sorted(checkout.folder.rglob("*"))

    result = checkout.set_up(FAKE_PIP="fails")
    assert result.returncode == 1
    assert "installing setuptools failed" in result.stderr
    assert "ERROR: No matching distribution found for torch" in result.stderr
    assert sorted(checkout.folder.rglob("*")) == before
    assert scratch_folders(checkout) == []

    assert checkout.set_up().returncode == 0


def test_a_failed_update_keeps_the_venv_and_is_tried_again(checkout: Checkout) -> None:
    checkout.add_python("python3.11")
    checkout.set_up()
    (checkout.folder / "constraints.txt").write_text("torch==99\n")

    assert "failed" in checkout.set_up(FAKE_PIP="fails").stderr
    assert (checkout.venv / "bin" / "python").exists()
    assert not checkout.stamp.exists()

    installed = checkout.calls.count("pip .[dev]")
    assert checkout.set_up().returncode == 0
    assert checkout.calls.count("pip .[dev]") == installed + 1
    assert checkout.stamp.exists()


@pytest.mark.parametrize("pip", ["works", "fails"])
def test_a_venv_of_the_users_own_is_installed_into_and_never_removed(checkout: Checkout, pip: str) -> None:
    (checkout.venv / "bin").mkdir(parents=True)
    shutil.copy(checkout.add_python("python3.11"), checkout.venv / "bin" / "python")
    (checkout.venv / "mine").touch()

    result = checkout.set_up(FAKE_PIP=pip)
    assert result.returncode == (pip == "fails")
    assert "venv by python3.11" not in checkout.calls
    assert (checkout.venv / "mine").exists()
    assert checkout.stamp.exists() == (pip == "works")


@pytest.mark.parametrize("pretend", [None, "sys.version_info = (3, 9, 2)", "sys.modules['pip'] = None"])
def test_a_venv_of_the_users_own_that_is_of_no_use_is_one_line(checkout: Checkout, pretend: str | None) -> None:
    checkout.add_python("python3.11")
    (checkout.venv / "bin").mkdir(parents=True)
    if pretend is not None:
        shutil.copy(checkout.add_python("theirs", pretend), checkout.venv / "bin" / "python")

    result = checkout.set_up()
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "move it away" in result.stderr
    assert (checkout.venv / "bin").exists()
    assert checkout.calls == []


def test_a_moved_checkout_gets_a_venv_of_its_own(checkout: Checkout) -> None:
    checkout.add_python("python3.11")
    checkout.set_up()
    (checkout.venv / "old").touch()
    moved = Checkout(checkout.folder.rename(checkout.folder.with_name("moved")), checkout.path)

    result = moved.set_up()
    assert result.returncode == 0
    assert "anew" in result.stderr
    assert moved.calls.count("venv by python3.11") == 2
    assert not (moved.venv / "old").exists()


def test_a_venv_that_lost_its_python_is_made_anew(checkout: Checkout) -> None:
    checkout.add_python("python3.11")
    checkout.set_up()
    (checkout.venv / "bin" / "python").unlink()
    assert checkout.set_up().returncode == 0
    assert checkout.calls.count("venv by python3.11") == 2


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_set_up_leaves_no_venv_and_no_process(checkout: Checkout, end: signal.Signals) -> None:
    checkout.add_python("python3.11")
    grandchild = checkout.path / "calls.grandchild"
    process = checkout.start(FAKE_PIP="hangs")
    wait_until(lambda: grandchild.exists() and grandchild.read_text().endswith("\n"))

    process.send_signal(end)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + end
    assert "interrupted" in err
    assert not checkout.venv.exists()
    assert scratch_folders(checkout) == []
    wait_until(lambda: not is_running(int(grandchild.read_text())))


def test_what_a_killed_set_up_left_is_made_anew(checkout: Checkout) -> None:
    checkout.add_python("python3.11")
    grandchild = checkout.path / "calls.grandchild"
    process = checkout.start(FAKE_PIP="hangs")
    wait_until(lambda: grandchild.exists() and grandchild.read_text().endswith("\n"))
    process.kill()
    process.wait()
    os.kill(int(grandchild.read_text()), signal.SIGKILL)  # it still holds the lock, as a pip that goes on would
    process.communicate(timeout=20)
    assert checkout.stamp.exists()

    result = checkout.set_up()
    assert result.returncode == 0, result.stderr
    assert "half-made" in result.stderr
    assert checkout.calls.count("venv by python3.11") == 2


def test_two_set_ups_at_once_install_once(checkout: Checkout) -> None:
    if shutil.which("flock") is None:
        unavailable("no flock, without which set-ups do not wait for each other: install the package util-linux")
    checkout.add_python("python3.11")
    processes = [checkout.start(FAKE_PIP="slow") for _ in range(3)]
    for process in processes:
        process.communicate(timeout=30)
        assert process.returncode == 0
    assert checkout.calls == ["venv by python3.11", "pip setuptools", "pip .[dev]"]


def test_every_requirement_is_pinned() -> None:
    """A requirement without a pin would bring, some day, a version that no test has seen."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    requirements = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["dev"],
    ]
    lines = (PROJECT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    for requirement in map(Requirement, requirements):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement
