"""The wheel: it is installed as package `samebits`, and runs outside a clone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.jobs import LIMIT, PROJECT

pytestmark = pytest.mark.launched
FLAGS = ("--use_cpu", "--threads=1", "--max_steps=2", "--max_length=16", "--eval_strategy=no", "--no_baselines")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder that contains what `pip install samebits-*.whl` installs."""
    folder = tmp_path_factory.mktemp("wheel")
    source, target = folder / "source", folder / "installed"
    shutil.copytree(PROJECT / "app", source / "app", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    subprocess.run([*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", folder, source], check=True)
    (wheel,) = folder.glob("samebits-*.whl")
    subprocess.run([*pip, "install", *offline, "--target", target, wheel], check=True)
    return target


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    """A folder of a user, whose own modules have the names of others."""
    for name in ("app.py", "random.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module was imported')\n")
    return tmp_path


def samebits(installed: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command `samebits` without the clone."""
    environment = {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(cwd / "cache")}
    command = [sys.executable, str(installed / "bin" / "samebits"), *arguments]
    return subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )


@pytest.mark.slow
def test_compare_trains_on_the_bundled_sample(installed, elsewhere):
    done = samebits(installed, elsewhere, "compare", "--nproc_per_node=2", *FLAGS)
    assert done.returncode == 0, done.stderr
    assert "sample_reviews.csv (the bundled synthetic sample" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("bitwise identical")
    assert "python -m samebits.compare" in done.stdout
    assert "app." not in done.stdout
    (folder,) = (elsewhere / "runs" / "comparisons").iterdir()
    assert (folder / "comparison.html").exists()
    comparison = json.loads((folder / "comparison.json").read_text())
    assert [(run["path"], run["world_size"]) for run in comparison["runs"]] == [
        (path, 2) for path in ("ddp_loop", "trainer_run")
    ]
    assert comparison["first_differing_step"] is None
    assert comparison["max_loss_difference"] == 0
    for file in ("predictions.csv", "model/model.safetensors", "split.json"):
        assert len({(folder / path / file).read_bytes() for path in ("ddp_loop", "trainer_run")}) == 1, file


def test_a_mistake_is_one_line(installed, elsewhere):
    done = samebits(installed, elsewhere, "train", "--csv", "nope.csv")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: nope.csv: no such file\n"


def test_downloads_go_to_the_users_cache(installed, elsewhere):
    done = samebits(installed, elsewhere, "download", "--url", "file:///does/not/exist.csv")
    assert done.returncode == 1
    assert (elsewhere / "cache" / "samebits").is_dir()


def test_help_names_the_installed_package(installed, elsewhere):
    done = samebits(installed, elsewhere, "train", "--help")
    assert done.returncode == 0, done.stderr
    assert "torchrun --standalone --nproc_per_node=2 -m samebits.ddp_loop" in done.stdout
    assert "app." not in done.stdout
