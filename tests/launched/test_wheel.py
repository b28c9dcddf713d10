"""The wheel: it is installed as package `samebits`, and runs outside a clone."""

from __future__ import annotations

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


def samebits(installed: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command `samebits` without the clone, in the folder of a user whose modules have the names of others."""
    for name in ("app.py", "random.py"):
        (cwd / name).write_text("raise SystemExit('the wrong module was imported')\n")
    environment = {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(cwd / "cache")}
    command = [sys.executable, str(installed / "bin" / "samebits"), *arguments]
    return subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )


@pytest.mark.slow
def test_compare_trains_on_the_bundled_sample(installed, tmp_path):
    done = samebits(installed, tmp_path, "compare", "--nproc_per_node=2", *FLAGS)
    assert done.returncode == 0, done.stderr
    assert "sample_reviews.csv (the bundled synthetic sample" in done.stdout
    (folder,) = (tmp_path / "runs" / "comparisons").iterdir()
    *_, identical, page = done.stdout.splitlines()
    assert identical.startswith("bitwise identical")
    assert page == f"open {folder.relative_to(tmp_path)}/comparison.html"
    assert "samebits.data.download" in done.stdout
    assert "app." not in done.stdout
    assert (folder / "comparison.html").exists()
    for file in ("predictions.csv", "model/model.safetensors", "split.json"):
        assert len({(folder / path / file).read_bytes() for path in ("ddp_loop", "trainer_run")}) == 1, file


@pytest.mark.parametrize(
    ("arguments", "status", "printed"),
    [
        ("train --csv nope.csv", 2, "error: nope.csv: no such file\n"),
        ("train --help", 0, "torchrun --standalone --nproc_per_node=2 -m samebits.ddp_loop"),
        ("download --url file:///does/not/exist.csv", 1, "error: "),
    ],
)
def test_programs_name_the_installed_package_and_leave_downloads_in_the_users_cache(
    installed, tmp_path, arguments, status, printed
):
    done = samebits(installed, tmp_path, *arguments.split())
    assert done.returncode == status, done.stderr
    assert printed in done.stdout + done.stderr
    assert "app." not in done.stdout
    assert (tmp_path / "cache" / "samebits").is_dir() == arguments.startswith("download")


@pytest.mark.slow
def test_the_plugin_works_in_another_repository(installed, tmp_path):
    """tests/test_pytest_plugin.py has more of it."""
    environment = os.environ | {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    test = 'def test_rows(trajectory):\n    trajectory("constant", lambda: [{"loss": 0.1}])\n'
    (tmp_path / "test_it.py").write_text(test)
    author = ["-c", "user.name=someone", "-c", "user.email=someone@example.com"]
    for command in (["init"], ["add", "--all"], [*author, "commit", "--message", "A test"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)

    def status(*flags: str) -> int:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *flags]
        return subprocess.run(command, cwd=tmp_path, env=environment, check=False, timeout=LIMIT).returncode

    assert [status(), status("--update-trajectories"), status()] == [1, 0, 0]
    (tmp_path / "test_it.py").write_text(test.replace("0.1", "0.10000000000000002"))
    assert status() == 1
