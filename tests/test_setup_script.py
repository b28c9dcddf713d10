"""Test run_scripts/setup.sh without a network: a fake Python notes which environments and packages it installs."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[1]
INSTALLED_ONCE = ["venv", "pip setuptools", "pip .[dev]"]
FAKE_PYTHON = """#!/usr/bin/env bash
case "$2" in
  venv) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo venv >>"$CALLS" ;;
  pip) echo "pip ${@: -1}" >>"$CALLS"; if [ -n "${FAIL:-}" ]; then echo "ERROR: no torch" >&2; exit 1; fi ;;
esac
"""


class Checkout:
    """A copy of the files that setup.sh reads, and a fake Python."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log, self.python = folder / "a checkout", folder / "calls", folder / "python"
        (self.folder / "run_scripts").mkdir(parents=True)
        for name in ("pyproject.toml", "constraints.txt", "run_scripts/setup.sh"):
            shutil.copy(PROJECT / name, self.folder / name)
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def set_up(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        environment |= {"PATH": os.environ["PATH"], "PYTHON": str(self.python), "CALLS": str(self.log)}
        command = ["bash", "run_scripts/setup.sh", *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=30
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_a_setup_installs_only_what_has_changed(checkout):
    assert checkout.set_up().returncode == 0
    assert checkout.calls == INSTALLED_ONCE
    again = checkout.set_up()
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert checkout.calls == INSTALLED_ONCE
    # DeepSpeed is installed on request, and kept up to date afterwards.
    checkout.set_up("--deepspeed")
    updated = ["pip setuptools", "pip .[dev]", "pip .[dev,deepspeed]"]
    assert checkout.calls == [*INSTALLED_ONCE, *updated]
    checkout.set_up()
    assert checkout.calls == [*INSTALLED_ONCE, *updated]
    (checkout.folder / "constraints.txt").write_text("torch==3\n")
    checkout.set_up()
    assert checkout.calls == [*INSTALLED_ONCE, *updated, *updated]


def test_a_failed_installation_is_repeated_in_the_same_environment(checkout):
    failed = checkout.set_up(FAIL="yes")
    assert failed.returncode != 0
    assert "ERROR: no torch" in failed.stderr
    assert checkout.set_up().returncode == 0
    assert checkout.calls == ["venv", "pip setuptools", *INSTALLED_ONCE[1:]]


def test_an_environment_that_was_moved_is_created_again(checkout):
    checkout.set_up()
    checkout.folder = checkout.folder.rename(checkout.folder.with_name("moved"))
    checkout.set_up()
    assert checkout.calls == INSTALLED_ONCE * 2


def test_a_mistake_is_one_line_before_anything_is_installed(checkout):
    done = checkout.set_up("--cuda")
    assert (done.returncode, checkout.calls) == (1, [])
    assert done.stderr == "setup.sh: unknown argument --cuda: only --deepspeed is possible\n"


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
