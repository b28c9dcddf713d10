"""The code for GPUs, on fake ones (`tests/fake_cuda/README.md`): no error, no race, the same bits, few waits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from fake_cuda.requirement import require_fake_gpus
from helpers.architectures import write_model
from helpers.jobs import ON_FAKE_GPUS, Job, Outcome, TrainingRun, require_success, run_many, write_subset

from app.runs.hashes import hash_run

pytestmark = [pytest.mark.launched, pytest.mark.slow]
LOGGING_STEPS = 2
FLAGS = ["--csv=reviews.csv", "--train_batch_size=8", "--max_length=16", "--dropout=0.1", "--max_grad_norm=0.5"]
FLAGS += ["--logical_ranks=4", f"--logging_steps={LOGGING_STEPS}", "--max_steps=4", "--model=bert"]
FLAGS += ["--eval_strategy=no", "--save_strategy=no"]
# Several buckets, so that exchanges overlap with the backward pass.
BUCKETS = "--model=tiny-bert --ddp_bucket_cap_mb=1"
GROUPS = {  # of runs with the same bits, with the flags that all of them have
    "fp32": "",
    "bf16": "--bf16",
    "fp16": "--precision=fp16",
    "accumulation": "--gradient_accumulation_steps=2",
    "bf16_hook": "--ddp_comm_hook=bf16",
    "fp16_hook": "--ddp_comm_hook=fp16",
    "power_sgd": "--ddp_comm_hook=power_sgd --logical_ranks=2",
    "saved": "--save_strategy=steps --save_steps=2 --eval_strategy=steps --eval_steps=2 --validation_size=0.1"
    " --load_best_model_at_end --metric_for_best_model=loss",
    "buckets": BUCKETS,
    "bf16_hook_buckets": f"{BUCKETS} --ddp_comm_hook=bf16",
    "gpt2": "--model=gpt2",
    # Two logging intervals longer than fp32, to count how often the host waits.
    "long_fp32": f"--max_steps={4 + 2 * LOGGING_STEPS}",
}
PATHS, STRATEGIES = ("ddp_loop", "trainer_run"), ("ddp", "zero1", "zero2", "zero3")
OFFLOAD = "--strategy=zero3 --cpu_offload"
RESUMED = "--resume_from_checkpoint=saved-{}/checkpoints/checkpoint-2"
# The runs of each job: what comes before the first "-" in a name is the group.
TWO_RANKS = {
    f"{group}-{path}-{strategy}": f"{path} --strategy={strategy}"
    for group, path, strategy in product(("fp32", "long_fp32"), PATHS, STRATEGIES)
} | {
    "gpt2-2": "ddp_loop",
    "fp32-offload": f"ddp_loop {OFFLOAD}",
    "fp32-trainer-offload": f"trainer_run {OFFLOAD}",
    "fp32-checkpointing": "ddp_loop --activation_checkpointing --strategy=zero3",
    "fp32-trainer-checkpointing": "trainer_run --activation_checkpointing",
    "fp32-unused": "ddp_loop --ddp_find_unused_parameters",
    "fp32-profile": "ddp_loop --profile=1",
    "fp32-trainer-profile": "trainer_run --profile=1 --strategy=zero3",
    "bf16-ddp": "ddp_loop",
    "bf16-zero3": "ddp_loop --strategy=zero3",
    "bf16-trainer": "trainer_run --strategy=zero2",
    "fp16-ddp": "ddp_loop",
    "fp16-zero3": "ddp_loop --strategy=zero3",
    "fp16-trainer-offload": f"trainer_run {OFFLOAD}",
    "accumulation-ddp": "ddp_loop",
    "accumulation-trainer": "trainer_run --strategy=zero2",
    "bf16_hook-2": "ddp_loop",
    "bf16_hook-trainer": "trainer_run --strategy=zero1",
    "fp16_hook-2": "ddp_loop",
    "power_sgd-2": "ddp_loop",
    "power_sgd-trainer": "trainer_run",
    "saved-ddp_loop": "ddp_loop --strategy=zero3",
    "saved-trainer_run": "trainer_run",
    "saved-resumed-offload": f"ddp_loop {OFFLOAD} {RESUMED.format('ddp_loop')}",
    "saved-resumed-trainer": f"trainer_run --strategy=zero1 {RESUMED.format('trainer_run')}",
    "buckets-2": "ddp_loop",
    "bf16_hook_buckets-2": "ddp_loop",
}
ONE_RANK = {  # with deterministic algorithms
    "fp32-1": "ddp_loop",
    "fp32-zero3-1": "ddp_loop --strategy=zero3",
    "fp32-trainer-1": "trainer_run",
    "bf16-1": "ddp_loop",
    "fp16_hook-1": "ddp_loop",
}
FOUR_RANKS = {
    "fp32-zero3-4": "ddp_loop --strategy=zero3",
    "fp32-trainer-zero1-4": "trainer_run --strategy=zero1",
    "fp32-offload-4": f"trainer_run {OFFLOAD}",
    "bf16-4": "ddp_loop",
    "buckets-4": "ddp_loop",
    "bf16_hook_buckets-4": "ddp_loop",
    "fp16_hook-4": "trainer_run",
    "saved-resumed-4": f"trainer_run --strategy=zero2 {RESUMED.format('trainer_run')}",
}
TWO_NODES = {  # with two ranks each: gradients are summed inside the nodes first
    "fp32-trainer-nodes": "trainer_run",
    "fp32-zero3-nodes": "ddp_loop --strategy=zero3",
    "buckets-nodes": "ddp_loop --strategy=zero1",
    "bf16_hook_buckets-nodes": "ddp_loop",
}


@pytest.fixture(scope="module")
def folder(hotel_csv, tmp_path_factory) -> Path:
    """The folder of all runs, with reviews and models."""
    require_fake_gpus()
    folder = tmp_path_factory.mktemp("fake-gpus")
    write_subset(hotel_csv, folder / "reviews.csv", 120)
    for model in ("bert", "gpt2"):
        write_model(folder / model, model)
    return folder


def train(folder: Path, runs: Mapping[str, str], *flags: str, **options: Any) -> dict[str, Outcome]:
    """Train runs in one job."""
    jobs = {}
    for name, command in runs.items():
        path, *own = command.split()
        jobs[name] = TrainingRun(path, [*FLAGS, *GROUPS[name.partition("-")[0]].split(), *own, *flags])
    return run_many(folder, jobs, fake_gpus=True, job_flags=flags, **options)


@pytest.fixture(scope="module")
def two_ranks(folder) -> dict[str, Outcome]:
    """The outcomes of the first job, of which others resume runs."""
    return train(folder, TWO_RANKS)


OTHER_JOBS: dict[str, tuple[dict[str, str], list[str], dict[str, Any]]] = {  # runs, flags and options
    "one rank, deterministic": (ONE_RANK, ["--deterministic"], {"ranks": 0}),
    "four ranks": (FOUR_RANKS, [], {"ranks": 4}),
    "two nodes of two ranks": (TWO_NODES, [], {"ranks": 4, "RANKS_PER_NODE": "2"}),
}


@pytest.mark.parametrize("job", ["two ranks", *OTHER_JOBS])
def test_all_runs_have_neither_errors_nor_races_and_those_of_a_group_have_the_same_bits(folder, two_ranks, job):
    outcomes = dict(two_ranks)
    if job in OTHER_JOBS:
        runs, flags, options = OTHER_JOBS[job]
        outcomes |= train(folder, runs, *flags, **options)
    require_success(outcomes)
    races = {name: race for name, one in outcomes.items() for report in one.reports for race in report["races"]}
    assert not races, races
    assert all(report["kernels"] for one in outcomes.values() for report in one.reports)
    hashes: dict[str, dict[str, str]] = {}
    for name in outcomes:
        hashes.setdefault(name.partition("-")[0], {})[name] = hash_run(folder / name)
    different = {group: runs for group, runs in hashes.items() if len(set(runs.values())) > 1}
    assert not different, different
    if "buckets-nodes" in outcomes:
        notes = {note for report in outcomes["buckets-nodes"].reports for note in report["notes"]}
        assert any(note.endswith(" in a group of 2") for note in notes), notes


@pytest.mark.parametrize("name", [name.removeprefix("long_") for name in TWO_RANKS if name.startswith("long_")])
def test_the_host_waits_once_per_logging_interval(two_ranks, name):
    short, long = (two_ranks[run].reports[0]["waits"] for run in (name, f"long_{name}"))
    more = Counter(long) - Counter(short)
    assert more.total() <= 2, more


def test_the_laboratory_measures_without_errors_and_races(folder):
    flags = ["--threads=1", "--output_dir=laboratory", "--seconds_per_point=0.001"]
    flags += ["--csv=reviews.csv", "--max_length=16", "--train_batch_size=8", "--model=bert"]
    flags += ["--sections", "breakdown", "no_sync", "compression"]  # the others train in the same way
    command = [ON_FAKE_GPUS, "--report=reports", "app.bench.communication", *flags]
    with Job(*map(str, command), cwd=folder) as job:
        done = job.finish()
    assert done.status == 0, done.err
    for rank in range(2):
        report = json.loads((folder / "reports" / f"report-{rank}.json").read_text())
        assert report["races"] == {}
        assert any(note.startswith("nccl ") for note in report["notes"])
