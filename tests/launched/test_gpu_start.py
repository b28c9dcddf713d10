"""How jobs start and end on machines with GPUs. Without a GPU, a script simulates the GPU of a rank's node."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.jobs import SAMPLE_CSV, TrainingRun, require_success, run_many
from safetensors.torch import load_file

PATHS = ("ddp_loop", "trainer_run")
SMALL = ("--csv", SAMPLE_CSV, "--train_batch_size", 8, "--max_length", 32, "--max_steps", 3, "--threads", 1)

# argv: the entry point's name, then its flags. GPUS lists the number of GPUs that each rank's node has.
ON_NODES = """
import os, sys
import torch
gpus = int(os.environ["GPUS"].split(",")[int(os.environ.get("RANK", 0))])
torch.cuda.is_available = lambda: gpus > 0
torch.cuda.device_count = lambda: gpus
def no_context():
    raise RuntimeError("CUDA error: out of memory")
torch.cuda._lazy_init = no_context
if os.environ.get("UNKNOWN_FLAG_ON") == os.environ.get("RANK", "0"):
    sys.argv += ["--lerning_rate", "1"]
from importlib import import_module
from app.program import launch
launch(import_module(sys.argv.pop(1)).main, None)
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "on_nodes.py"
    path.write_text(ON_NODES)
    return path


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "unknown_flag_on", "reported"),
    [
        ("2,0", "", "rank(s) 1 ("),
        ("2,1", "", "rank 1: --nproc_per_node=2"),
        ("2,2", "1", "rank 1: unknown argument --lerning_rate"),
    ],
)
def test_nodes_with_different_gpus_end_with_one_line(launch, script, gpus, unknown_flag_on, reported):
    done = launch(str(script), "app.ddp_loop", *SMALL, ranks=2, GPUS=gpus, UNKNOWN_FLAG_ON=unknown_flag_on)
    assert len(done.error_lines) == 1, done.err
    assert reported in done.error_lines[0]
    assert "exitcode  : 2" in done.err


@pytest.mark.launched
@pytest.mark.parametrize("path_name", ["ddp_loop", pytest.param("trainer_run", marks=pytest.mark.slow)])
def test_a_cpu_run_finishes_on_a_machine_whose_gpu_is_full(launch, script, path_name):
    flags = [*SMALL, "--use_cpu", "--bf16", "--eval_strategy", "no", "--test_size", 0.02, "--output_dir", "run"]
    done = launch(str(script), f"app.{path_name}", *flags, GPUS="1")
    assert done.status == 0, done.err


@pytest.mark.launched
@pytest.mark.slow
def test_a_rank_that_does_not_answer_stop_requests_is_given_up_after_ddp_timeout(launch, tmp_path):
    """The default group's timeout stands for NCCL's, which is longer."""
    script = tmp_path / "frozen.py"
    script.write_text(
        "import signal\n"
        "from dataclasses import replace\n"
        "from datetime import timedelta\n"
        "from app.program import launch\n"
        "from app.distributed.process_group import join\n"
        "from app.distributed.preemption import StopRequest\n"
        "def main(settings):\n"
        "    with join(settings) as world, StopRequest(replace(world, timeout=timedelta(seconds=5))) as stop:\n"
        "        if world.rank == 1:\n"
        "            signal.pause()\n"
        "        stop.requested()\n"
        "        stop.requested()\n"
        "launch(main, None)\n"
    )
    done = launch(str(script), "--use_cpu", "--threads", 1, "--ddp_timeout", 600, ranks=2)
    assert len(done.error_lines) == 1, done.err
    assert "lost contact with rank(s) 1" in done.error_lines[0]


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
