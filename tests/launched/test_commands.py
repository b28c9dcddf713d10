"""Each command and each launcher as a user starts them, once; test_wheel.py and test_pages.py start the others."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.architectures import write_model
from helpers.jobs import SAMPLE_CSV, Finished, Job, unavailable, write_subset

from app.bench.communication import DEFAULT
from app.bench.two_nodes import run_command
from app.runs.reader import read_run

pytestmark = [pytest.mark.launched, pytest.mark.slow]
PATHS = ("ddp_loop", "trainer_run")
CPU = ["--use_cpu", "--threads=1"]
BRIEF = ["--csv=reviews.csv", "--max_length=16", "--train_batch_size=8", *CPU]


@pytest.fixture
def start(launch, review_csv, tmp_path) -> Callable[..., str]:
    """Run a program that has to succeed in the test's folder, which has reviews and a model. Return what it prints."""
    review_csv(150)
    write_model(tmp_path / "bert", "bert")

    def run(program: str, *flags: Any, **options: Any) -> str:
        done = launch(program, *flags, **options)
        assert done.status == 0, done.out + done.err
        return done.out

    return run


def content_of(file: Path) -> Any:
    return json.loads(file.read_text())


def require_success(done: Finished) -> None:
    """Assert that a job has succeeded, if this machine can have two nodes."""
    if done.status == 2 and "two nodes on one machine need" in done.err:
        unavailable(done.err)
    assert done.status == 0, done.err


# ---- launchers -------------------------------------------------------------------------------------------------------

ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision=no", "--num_machines=1"]
ACCELERATE += ["--dynamo_backend=no", "--num_processes=2"]
LAUNCHERS = {  # the options of a job, and the number of ranks
    # accelerate starts a single process on the CPU unless it uses MPI, and several ones if it asks for GPUs.
    # The cache of models may be shared and read-only: the folder cannot be created.
    "accelerate": ({"prefix": [*ACCELERATE, "--cpu", "--no_python"], "HF_HOME": "/proc/none"}, 1),
    "accelerate, 2": ({"prefix": [*ACCELERATE, "--multi_gpu", "--main_process_port=0", "--no_python"]}, 2),
    # The launcher of older tutorials passes `--local-rank` to each process. With --use-env it is torchrun.
    "torch.distributed.launch": ({"ranks": 2, "torchrun_flags": ["--standalone"]}, 2),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_both_paths_train_identically_under_other_launchers(review_csv, tmp_path, name):
    # accelerate exports ACCELERATE_MIXED_PRECISION=no; the flag has to take precedence in Trainer too.
    flags = ["--csv", review_csv(), "--max_steps=2", "--train_batch_size=8", "--use_cpu", "--precision=bf16"]
    options, ranks = LAUNCHERS[name]
    for path in PATHS:
        job = Job(path, *flags, f"--output_dir={path}", cwd=tmp_path, **{"ranks": 0} | options)
        if "torch.distributed" in name:
            job.command[job.command.index("torch.distributed.run")] = "torch.distributed.launch"
        with job:
            done = job.finish()
        assert done.status == 0, done.err
    runs = [read_run(tmp_path / path) for path in PATHS]
    assert [(run.settings["world_size"], run.settings["precision"]) for run in runs] == [(ranks, "bf16")] * 2
    assert runs[0].metrics["hash"] == runs[1].metrics["hash"]


def test_any_number_of_ranks_predicts_the_same_bytes(start, launch, tmp_path):
    flags = ["--max_steps=2", "--eval_strategy=no", "--eval_batch_size=8", "--logical_ranks=2", "--output_dir=run"]
    start("ddp_loop", *BRIEF, *flags, ranks=2)
    for ranks in (0, 4):
        start("predict", "run", "--split=test", f"--output={ranks}.csv", "--use_cpu", ranks=ranks)
        assert (tmp_path / f"{ranks}.csv").read_bytes() == (tmp_path / "run" / "predictions.csv").read_bytes()
    mistake = launch("predict", "run", "好", "--use_cpu", ranks=2)
    assert mistake.status != 0
    (line,) = mistake.error_lines
    assert line.startswith("error: texts are predicted by one process")


# ---- the laboratory --------------------------------------------------------------------------------------------------


def test_same_bits_trains_both_paths(start, hotel_csv, tmp_path):
    write_subset(hotel_csv, tmp_path / "reviews.csv", 1000)
    flags = ["--ranks=2", "--strategies=ddp", "--interruptions=uninterrupted", "--logical_ranks=2", "--max_steps=20"]
    flags += ["--csv=reviews.csv", "--eval_steps=15", "--train_batch_size=48", "--output_dir=table"]
    printed = start("app.experiments.same_bits", *flags, limit=500)
    table = (tmp_path / "table" / "same_bits.md").read_text()
    assert table in printed
    assert "all 2 cells have one hash: bitwise identical\n" in table
    for path in PATHS:
        run = read_run(tmp_path / "table" / f"{path}-2-ddp")
        assert (run.settings["path"], run.settings["world_size"], run.settings["logical_ranks"]) == (path, 2, 2)


def test_killed_ranks_resume_and_nothing_is_lost(start):
    printed = start("app.experiments.faults", "--kills=2", "--seed=5", "--csv", SAMPLE_CSV, limit=700)
    assert printed.splitlines()[-1].startswith("2 kills in ")


def test_the_ranks_send_what_is_predicted(start):
    """PowerSGD uses the results of its collectives, so tests/plan/test_traffic.py can't count it without all ranks."""
    for flags in (["--ddp_comm_hook=power_sgd"], ["--logical_ranks=4", "--gradient_accumulation_steps=2"]):
        start("app.bench.traffic", *BRIEF, "--model=bert", "--train_batch_size=16", *flags, ranks=2)


def test_communication_is_measured_on_two_ranks(start, tmp_path):
    flags = [*BRIEF, "--model=bert", "--output_dir=out", "--seconds_per_point=0.001", "--max_steps=8", "--seeds=1"]
    names = [*dict.fromkeys([*DEFAULT, "readiness", "ladder", "convergence"])]
    printed = start("app.bench.communication", *flags, "--sections", *names, ranks=2)
    assert (tmp_path / "out" / "communication.md").read_text().rstrip() in printed
    content = content_of(tmp_path / "out" / "communication.json")
    machine, sections = content["machine"], content["sections"]
    assert {*sections} == {*names}
    assert (machine["backend"], machine["ranks"]) == ("gloo", "2 on 1 node(s)")
    losses = sections["convergence"]["losses"].values()
    assert [len(of_seeds[0]) for of_seeds in losses] == [8, 4, 4, 2, 2, 1, 1]
    differences = sections["ladder"]["loss_differences"]
    assert differences.pop("no exchange") > 0
    # The sum of two gradients does not depend on their order, so the losses are the same with any buckets.
    assert list(differences.values()) == [0.0] * 10


def test_communication_is_measured_over_a_link(start, launch, tmp_path):
    flags = [*BRIEF, "--model=bert", "--output_dir=out", "--seconds_per_point=0.001", "--link=0.05:2"]
    done = launch("app.bench.communication", *flags, "--sections", "breakdown", "compression", real=True)
    require_success(done)
    content = content_of(tmp_path / "out" / "communication.json")
    assert (content["machine"]["ranks"], content["machine"]["link"]) == ("2 on 2 node(s)", "0.05 Gbit/s, 2 ms")
    assert list(content["sections"]) == ["breakdown", "compression"]


def test_recipes_are_timed_on_two_ranks(start, tmp_path):
    recipes = ("ddp_loop", "trainer_run", "tutorial", "trainer-defaults")  # one of each program
    flags = [*BRIEF, "--steps=2", "--rounds=1", "--output_dir=out", "--model=4x312", "--precision=bf16"]
    printed = start("app.bench.speed", *flags)
    measured = content_of(tmp_path / "out" / "speed.json")["sections"]["speed"]
    for name in recipes:
        assert printed.count(f"\n| {name} ") == 1
        one = measured["rounds"][f"(0, '{name}')"]
        assert one["examples"] == 16, "2 steps of 8 rows, 4 of them on each rank"
        assert one["tokens"] <= one["padded_tokens"] <= 16 * 16


def test_scaling_is_measured_and_leaves_nothing(tmp_path):
    flags = ["--ranks", 2, "--links", "1:1", "--rounds", 1, "--steps", 2, "--max_length", 16, "--use_cpu"]
    flags += ["--train_batch_size", 4, "--strategies", "zero3", "--output_dir", tmp_path / "out"]
    with Job("app.bench.scaling", *flags, cwd=tmp_path, ranks=0) as job:
        require_success(job.finish())
    # Other tests may create and remove namespaces meanwhile.
    assert f"samebits-{job.torchrun.pid}-" not in run_command(["ip", "netns", "list"]).stdout
    seconds = content_of(tmp_path / "out" / "scaling.json")["sections"]["measured"]["seconds"]
    over_link = "ddp, 2 rank(s), 1 Gbit/s, 1 ms"
    assert {*seconds} == {"ddp, 2 rank(s)", "zero3, 2 rank(s)", over_link}
    assert min(seconds[over_link]) > 0.1, "5 million gradients take the link as long"
    assert all(value > 0 for times in seconds.values() for value in times)
