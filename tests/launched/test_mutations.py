"""`app.compare --assert_equal` lets nothing pass: one deliberate change at a time, and it says where it shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import PROJECT

from app.compare import main

pytestmark = pytest.mark.launched
FLAGS = ["--max_steps=4", "--max_length=32", "--warmup_steps=0", "--eval_strategy=no", "--save_strategy=no"]
FLAGS += ["--train_sampling_strategy=random", "--disable_tqdm"]
FLAGS += ["--max_grad_norm=0.1"]  # below every norm, so that each step is clipped


@pytest.fixture
def assert_equal(tmp_path, monkeypatch, capsys):
    """Exit status of `app.compare A B --assert_equal`, and its line on standard error."""

    def run(a: Path, b: Path) -> tuple[int, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["compare", str(a), str(b), "--assert_equal"])
        return main(), capsys.readouterr().err

    return run


@pytest.fixture(scope="module")
def original(hotel_csv, tmp_path_factory):
    """A run on the other road, so that what is caught is no habit of one of them."""
    folder = tmp_path_factory.mktemp("original")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, "-m", "app.trainer_run", f"--csv={hotel_csv}", *FLAGS, "--output_dir=run"]
    subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(PROJECT), "HF_HUB_OFFLINE": "1"},
        check=True,
        timeout=150,
    )
    return folder / "run"


@pytest.mark.parametrize(
    ("mutation", "shows"),
    [
        ("nothing", ""),
        ("another_seed", "not equal: step 1: the loss is "),
        ("one_weight", "not equal: step "),  # the last bit of one weight needn't show in a float32 loss at once
        ("one_label", "not equal: step 1: the loss is "),
        ("the_clip_value", "not equal: step 2: the "),
        ("the_ranks_rows", "not equal: step 1: the loss is "),
    ],
)
def test_a_change_that_no_setting_tells_of_is_caught(
    launch, assert_equal, original, hotel_csv, tmp_path, mutation, shows
):
    script = PROJECT / "tests" / "launched" / "mutated.py"
    flags = [f"--csv={hotel_csv}", *FLAGS, "--output_dir=mutated"]
    done = launch(str(script), *flags, ranks=2, MUTATION=mutation)
    assert done.status == 0, done.err
    status, line = assert_equal(original, tmp_path / "mutated")
    assert (status, line.startswith(shows)) == (int(mutation != "nothing"), True), line
    assert bool(line) == (mutation != "nothing")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "status", "shows"),
    [
        ("--seed=43", 2, "error: "),  # another seed splits otherwise: refused before anything is compared
        ("--max_grad_norm=0.0999", 1, "not equal: step 2: the "),
        ("--gradient_accumulation_steps=2", 1, "not equal: step 1: the "),
    ],
)
def test_a_setting_that_differs_is_caught(launch, assert_equal, original, hotel_csv, tmp_path, flag, status, shows):
    done = launch("app.ddp_loop", f"--csv={hotel_csv}", *FLAGS, flag, "--output_dir=other", ranks=2)
    assert done.status == 0, done.err
    found, line = assert_equal(original, tmp_path / "other")
    assert (found, line.startswith(shows)) == (status, True), line
