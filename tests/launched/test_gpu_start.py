"""How jobs start and end on machines with GPUs. Without a GPU, a script simulates the GPU of a rank's node."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.jobs import SAMPLE_CSV, TrainingRun, require_success, run_many
from safetensors.torch import load_file

PATHS = ("ddp_loop", "trainer_run")
ON_GPUS = str(Path(__file__).with_name("nodes_with_gpus.py"))
SMALL = ("--csv", SAMPLE_CSV, "--train_batch_size", 8, "--max_length", 32, "--max_steps", 3, "--threads", 1)


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize("path_name", ["ddp_loop", "trainer_run"])
def test_a_cpu_run_finishes_on_a_machine_whose_gpu_is_full(launch, path_name):
    flags = [*SMALL, "--use_cpu", "--bf16", "--eval_strategy", "no", "--test_size", 0.02, "--output_dir", "run"]
    done = launch(ON_GPUS, f"app.{path_name}", *flags, GPUS="1")
    assert done.status == 0, done.err


@pytest.mark.launched
@pytest.mark.slow
def test_deterministic_is_recorded_and_changes_no_bit_on_cpus(tmp_path):
    runs = {
        "plain": TrainingRun("ddp_loop", SMALL),
        "deterministic": TrainingRun("ddp_loop", [*SMALL, "--deterministic"]),
    }
    require_success(run_many(tmp_path, runs, ranks=0))
    a, b = (tmp_path / name for name in runs)
    assert (a / "model" / "model.safetensors").read_bytes() == (b / "model" / "model.safetensors").read_bytes()
    assert (a / "predictions.csv").read_bytes() == (b / "predictions.csv").read_bytes()
    assert '"deterministic": true' in (b / "settings.json").read_text()


@pytest.mark.gpu
@pytest.mark.launched
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_deterministic_runs_of_both_paths_have_the_same_weights_on_a_gpu(launch, tmp_path, precision):
    runs = [("a", "ddp_loop"), ("b", "ddp_loop"), ("c", "trainer_run")]
    for name, path_name in runs:
        flags = [*SMALL, "--max_steps", 20, "--deterministic", "--precision", precision, "--output_dir", name]
        done = launch(path_name, *flags, ranks=1)
        assert done.status == 0, done.err
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name, _ in runs]
    for other in weights[1:]:
        assert all(other[name].equal(tensor) for name, tensor in weights[0].items())
