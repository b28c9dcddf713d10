"""Both training paths under `accelerate launch`, which exports variables that only Trainer and accelerate read."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.jobs import Finished, Job

pytestmark = pytest.mark.launched
PATHS = ("ddp_loop", "trainer_run")
ONE_PROCESS = ("--cpu", "--num_processes=2")  # accelerate starts a single process on the CPU unless it uses MPI
TWO_PROCESSES = ("--multi_gpu", "--num_processes=2", "--main_process_port=0")  # without GPUs it starts them on the CPU


def accelerate_launch(path: str, *flags: object, launcher_flags: tuple[str, ...], cwd: Path) -> Finished:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision=no", *launcher_flags]
    launcher += ["--num_machines=1", "--dynamo_backend=no", "--no_python"]
    with Job(path, *flags, cwd=cwd, ranks=0, prefix=launcher) as job:
        return job.finish()


@pytest.mark.slow
@pytest.mark.parametrize(("launcher_flags", "world_size"), [(ONE_PROCESS, 1), (TWO_PROCESSES, 2)])
def test_both_paths_train_identically_under_plain_accelerate_launch(review_csv, tmp_path, launcher_flags, world_size):
    # accelerate exports ACCELERATE_MIXED_PRECISION=no; the flag has to take precedence in Trainer too.
    flags = ("--csv", review_csv(), "--max_steps", 2, "--train_batch_size", 8, "--use_cpu", "--precision", "bf16")
    for path in PATHS:
        done = accelerate_launch(path, *flags, "--output_dir", path, launcher_flags=launcher_flags, cwd=tmp_path)
        assert done.status == 0, done.err
    folders = [tmp_path / path for path in PATHS]
    for folder in folders:
        settings = json.loads((folder / "settings.json").read_text())
        assert (settings["world_size"], settings["precision"]) == (world_size, "bf16")
    for file in ("predictions.csv", "model/model.safetensors"):
        assert len({(folder / file).read_bytes() for folder in folders}) == 1, file
