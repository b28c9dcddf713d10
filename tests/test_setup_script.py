"""Test run_scripts/setup.sh without a network: a fake Python notes which environments and packages it installs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from helpers.jobs import PROJECT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ONCE = ["venv", "pip setuptools", "pip .[dev]"]
WITH_DEEPSPEED = ["pip setuptools", "pip .[dev]", "pip .[dev,deepspeed]"]
FAKE_PYTHON = """#!/usr/bin/env bash
case "$2" in
  venv) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo venv >>"$CALLS" ;;
  pip)
    echo "pip ${@: -1}" >>"$CALLS"; echo "Collecting torch"; echo "  Downloading torch-2.whl (899.8 MB)"
    if [ -n "${FAIL:-}" ]; then echo "ERROR: no torch" >&2; exit 1; fi ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A folder with the files that setup.sh reads."""
    folder = tmp_path / "a checkout"
    for name in ("pyproject.toml", "constraints.txt", "run_scripts/setup.sh"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, folder / name)
    return folder


@pytest.fixture
def set_up(tmp_path):
    """Run setup.sh in a folder. Return its exit status, its standard error, and what it has installed in this call."""
    log, python = tmp_path / "calls", tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)

    def call(folder: Path, *arguments: str, **environment: str) -> tuple[int, str, list[str]]:
        log.write_text("")
        environment |= {"PATH": os.environ["PATH"], "PYTHON": str(python), "CALLS": str(log)}
        command = ["bash", "run_scripts/setup.sh", *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=30)
        return done.returncode, done.stderr, log.read_text().splitlines()

    return call


def test_a_setup_installs_only_what_has_changed(checkout, set_up):
    status, shown, installed = set_up(checkout)
    assert (status, installed) == (0, ONCE)
    assert re.search(r"pip downloads PyTorch .* 0\.5 GB(?s:.)*  Downloading torch-2.whl \(899.8 MB\)\n", shown)
    assert "Collecting" not in shown
    assert set_up(checkout) == (0, "", [])
    assert set_up(checkout, "--deepspeed")[2] == WITH_DEEPSPEED
    assert set_up(checkout) == (0, "", [])
    (checkout / "constraints.txt").write_text("torch==3\n")
    assert set_up(checkout)[2] == WITH_DEEPSPEED, "once installed, DeepSpeed is kept up to date"


def test_a_failed_installation_is_repeated_in_the_same_environment(checkout, set_up):
    status, shown, installed = set_up(checkout, FAIL="yes")
    assert (status, installed) == (1, ONCE[:2])
    assert "ERROR: no torch" in shown
    assert set_up(checkout)[2] == ONCE[1:]


def test_an_environment_that_was_moved_is_created_again(checkout, set_up):
    set_up(checkout)
    assert set_up(checkout.rename(checkout.with_name("moved")))[2] == ONCE


def test_a_linked_environment_is_used_as_it_is(checkout, set_up):
    set_up(checkout)
    other = checkout.with_name("other")
    shutil.copytree(checkout, other, ignore=shutil.ignore_patterns(".venv"))
    (other / ".venv").symlink_to(checkout / ".venv")
    status, shown, installed = set_up(other)
    assert (status, shown.count("\n"), installed) == (0, 1, [])
    assert shown.startswith(f"setup.sh: .venv is a link to {checkout / '.venv'}")
    assert (other / ".venv").is_symlink()


def test_a_mistake_is_one_line_before_anything_is_installed(checkout, set_up):
    status, shown, installed = set_up(checkout, "--cuda")
    assert (status, shown.count("\n"), installed) == (1, 1, [])
    assert shown.startswith("setup.sh: unknown argument --cuda")


def test_every_requirement_is_pinned():
    """An unpinned requirement would one day install a version that no test has seen."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    requirements = sum(extras, project["build-system"]["requires"] + project["project"]["dependencies"])
    lines = (PROJECT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    for requirement in map(Requirement, requirements):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement
