"""The code for GPUs, on fake ones (`tests/fake_cuda/README.md`): no error, no race, the same bits, few waits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from fake_cuda.requirement import require_fake_gpus
from helpers.architectures import write_model
from helpers.jobs import ON_FAKE_GPUS, Job, Outcome, TrainingRun, run_many, write_subset

from app.runs.hashes import hash_run

pytestmark = [pytest.mark.launched, pytest.mark.slow]
PATHS, STRATEGIES = ("ddp_loop", "trainer_run"), ("ddp", "zero1", "zero2", "zero3")
LOGGING_STEPS = 2
FLAGS = ["--csv=reviews.csv", "--train_batch_size=8", "--max_length=16", "--dropout=0.1", "--max_grad_norm=0.5"]
FLAGS += ["--logical_ranks=4", f"--logging_steps={LOGGING_STEPS}", "--max_steps=4"]
QUIET = ["--eval_strategy=no", "--save_strategy=no"]
SAVED = ["--save_strategy=steps", "--save_steps=2", "--eval_strategy=steps", "--eval_steps=2"]
SAVED += ["--validation_size=0.1", "--load_best_model_at_end", "--metric_for_best_model=loss"]
OFFLOAD = ["--strategy=zero3", "--cpu_offload"]
MODEL = ["--model=bert"]
# Models that read from the device themselves wait once for it in each micro-batch.
WAITING_MODELS = ("gpt2", "modernbert")
MICRO_BATCHES = 2 * 2 * LOGGING_STEPS  # two per rank and step, in two logging intervals


def run(path: str, *flags: str, **options: Any) -> TrainingRun:
    return TrainingRun(path, [*FLAGS, *MODEL, *QUIET, *flags], **options)


def saved(path: str, *flags: str) -> TrainingRun:
    return TrainingRun(path, [*FLAGS, *MODEL, *SAVED, *flags])


def resumed(path: str, *flags: str) -> TrainingRun:
    return saved(path, *flags, f"--resume_from_checkpoint=saved-{path}/checkpoints/checkpoint-2")


def in_buckets(path: str, *flags: str, **options: Any) -> TrainingRun:
    """Train a model of several buckets, so that exchanges overlap with the backward pass."""
    return TrainingRun(path, [*FLAGS, *QUIET, "--model=tiny-bert", "--ddp_bucket_cap_mb=1", *flags], **options)


# What comes before the first "-" in a run's name is its group. All runs of a group have the same bits.
TWO_RANKS = {f"fp32-{path}-{name}": run(path, f"--strategy={name}") for path, name in product(PATHS, STRATEGIES)}
TWO_RANKS |= {
    "fp32-offload": run("ddp_loop", *OFFLOAD),
    "fp32-trainer-offload": run("trainer_run", *OFFLOAD),
    "fp32-checkpointing": run("ddp_loop", "--activation_checkpointing", "--strategy=zero3"),
    "fp32-trainer-checkpointing": run("trainer_run", "--activation_checkpointing"),
    "fp32-unused": run("ddp_loop", "--ddp_find_unused_parameters"),
    "fp32-profile": run("ddp_loop", "--profile=1"),
    "fp32-trainer-profile": run("trainer_run", "--profile=1", "--strategy=zero3"),
    "bf16-ddp": run("ddp_loop", "--bf16"),
    "bf16-zero3": run("ddp_loop", "--bf16", "--strategy=zero3"),
    "bf16-trainer": run("trainer_run", "--bf16", "--strategy=zero2"),
    "fp16-ddp": run("ddp_loop", "--precision=fp16"),
    "fp16-zero3": run("ddp_loop", "--precision=fp16", "--strategy=zero3"),
    "fp16-trainer-offload": run("trainer_run", "--precision=fp16", *OFFLOAD),
    "accumulation-ddp": run("ddp_loop", "--gradient_accumulation_steps=2"),
    "accumulation-trainer": run("trainer_run", "--gradient_accumulation_steps=2", "--strategy=zero2"),
    "bf16_hook-2": run("ddp_loop", "--ddp_comm_hook=bf16"),
    "bf16_hook-trainer": run("trainer_run", "--ddp_comm_hook=bf16", "--strategy=zero1"),
    "fp16_hook-2": run("ddp_loop", "--ddp_comm_hook=fp16"),
    "power_sgd-2": run("ddp_loop", "--ddp_comm_hook=power_sgd", "--logical_ranks=2"),
    "power_sgd-trainer": run("trainer_run", "--ddp_comm_hook=power_sgd", "--logical_ranks=2"),
    "saved-ddp_loop": saved("ddp_loop", "--strategy=zero3"),
    "saved-trainer_run": saved("trainer_run"),
    "saved-resumed-offload": resumed("ddp_loop", *OFFLOAD),
    "saved-resumed-trainer": resumed("trainer_run", "--strategy=zero1"),
    "buckets-2": in_buckets("ddp_loop"),
    "bf16_hook_buckets-2": in_buckets("ddp_loop", "--ddp_comm_hook=bf16"),
}
# Two logging intervals longer than those above, or than runs of the same model, to count how often the host waits.
LONGER = f"--max_steps={4 + 2 * LOGGING_STEPS}"
TWO_RANKS |= {
    f"long_fp32-{path}-{name}": run(path, f"--strategy={name}", LONGER) for path, name in product(PATHS, STRATEGIES)
}
TWO_RANKS |= {
    f"{length}{model}-1": TrainingRun("ddp_loop", [*FLAGS, *QUIET, f"--model={model}", *flags])
    for model, (length, flags) in product(WAITING_MODELS, {"": [], "long_": [LONGER]}.items())
}
ONE_RANK = {
    "fp32-1": run("ddp_loop", "--deterministic"),
    "fp32-zero3-1": run("ddp_loop", "--deterministic", "--strategy=zero3"),
    "fp32-trainer-1": run("trainer_run", "--deterministic"),
    "bf16-1": run("ddp_loop", "--deterministic", "--bf16"),
    "fp16_hook-1": run("ddp_loop", "--deterministic", "--ddp_comm_hook=fp16"),
    "saved-resumed-1": resumed("ddp_loop"),  # whose setting has to be the same; the job has set the algorithms
}
FOUR_RANKS = {
    "fp32-zero3-4": run("ddp_loop", "--strategy=zero3"),
    "fp32-trainer-zero1-4": run("trainer_run", "--strategy=zero1"),
    "fp32-offload-4": run("trainer_run", *OFFLOAD),
    "bf16-4": run("ddp_loop", "--bf16"),
    "buckets-4": in_buckets("ddp_loop"),
    "bf16_hook_buckets-4": in_buckets("ddp_loop", "--ddp_comm_hook=bf16"),
    "fp16_hook-4": run("trainer_run", "--ddp_comm_hook=fp16"),
    "saved-resumed-4": resumed("trainer_run", "--strategy=zero2"),
}
TWO_NODES = {  # with two ranks each: gradients are summed inside the nodes first
    "fp32-trainer-nodes": run("trainer_run"),
    "fp32-zero3-nodes": run("ddp_loop", "--strategy=zero3"),
    "buckets-nodes": in_buckets("ddp_loop", "--strategy=zero1"),
    "bf16_hook_buckets-nodes": in_buckets("ddp_loop", "--ddp_comm_hook=bf16"),
}
TF32 = {
    "tf32-ddp": run("ddp_loop", "--tf32"),
    "tf32-zero3": run("ddp_loop", "--tf32", "--strategy=zero3"),
    "tf32-trainer": run("trainer_run", "--tf32"),
}
BUGS = {
    "exchange_that_does_not_wait": in_buckets("ddp_loop"),
    "memory_that_is_not_recorded": in_buckets("ddp_loop", "--ddp_comm_hook=bf16"),
    "norm_on_the_cpu": run("ddp_loop", *OFFLOAD),
}


@pytest.fixture(scope="module")
def folder(hotel_csv, tmp_path_factory) -> Path:
    """The folder of all runs, with reviews and models."""
    require_fake_gpus()
    folder = tmp_path_factory.mktemp("fake-gpus")
    write_subset(hotel_csv, folder / "reviews.csv", 120)
    for model in ("bert", *WAITING_MODELS):
        write_model(folder / model, model)
    return folder


@pytest.fixture(scope="module")
def two_ranks(folder) -> dict[str, Outcome]:
    """The outcomes of the first job, of which others resume runs."""
    return run_many(folder, TWO_RANKS, fake_gpus=True)


@pytest.fixture(scope="module")
def bugs(folder) -> dict[str, Outcome]:
    runs = {name: replace(run, mutation=name) for name, run in BUGS.items()}
    return run_many(folder, runs, fake_gpus=True, ranks=4)


def check(folder: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Assert that runs have neither errors nor races, and that those of a group have the same bits."""
    problems = {name: one.problem for name, one in outcomes.items() if one.problem is not None}
    assert not problems, problems
    races = {name: race for name, one in outcomes.items() for report in one.reports for race in report["races"]}
    assert not races, races
    assert all(report["kernels"] for one in outcomes.values() for report in one.reports)
    hashes: dict[str, dict[str, str]] = {}
    for name in outcomes:
        hashes.setdefault(name.partition("-")[0], {})[name] = hash_run(folder / name)
    different = {group: runs for group, runs in hashes.items() if len(set(runs.values())) > 1}
    assert not different, different


def test_all_strategies_precisions_and_hooks_train_without_errors_and_races(folder, two_ranks):
    check(folder, two_ranks)


def test_one_rank_trains_the_same_bits_with_deterministic_algorithms(folder, two_ranks):
    check(folder, two_ranks | run_many(folder, ONE_RANK, ranks=0, fake_gpus=True, job_flags=["--deterministic"]))


def test_four_ranks_train_the_same_bits(folder, two_ranks):
    check(folder, two_ranks | run_many(folder, FOUR_RANKS, ranks=4, fake_gpus=True))


def test_two_nodes_of_two_ranks_train_the_same_bits(folder, two_ranks):
    outcomes = run_many(folder, TWO_NODES, ranks=4, fake_gpus=True, RANKS_PER_NODE="2")
    check(folder, two_ranks | outcomes)
    notes = {note for report in outcomes["buckets-nodes"].reports for note in report["notes"]}
    assert any(note.endswith(" in a group of 2") for note in notes), notes


def test_both_paths_multiply_in_tf32_on_request_and_record_it(folder, two_ranks):
    check(folder, run_many(folder, TF32, fake_gpus=True, job_flags=["--tf32"]))
    used = {
        name: json.loads((folder / name / "settings.json").read_text())["kernels"]["fp32_matmul_precision"]
        for name in (*TF32, "fp32-ddp_loop-ddp", "fp32-trainer_run-ddp")
    }
    assert used == {name: "high" if name in TF32 else "highest" for name in used}


@pytest.mark.parametrize("name", [name.removeprefix("long_") for name in TWO_RANKS if name.startswith("long_")])
def test_the_host_waits_once_per_logging_interval(two_ranks, name):
    short, long = (two_ranks[run].reports[0]["waits"] for run in (name, f"long_{name}"))
    more = Counter(long) - Counter(short)
    expected = 2 + MICRO_BATCHES * name.startswith(WAITING_MODELS)
    assert more.total() <= expected, more


@pytest.mark.parametrize("bug", BUGS)
def test_a_deliberate_bug_is_detected(bugs, bug):
    outcome = bugs[bug]
    if bug == "norm_on_the_cpu":
        assert "FakeCudaError" in str(outcome.problem)
    else:
        assert outcome.problem is None
        assert all(report["races"] for report in outcome.reports)


def test_only_zero3_never_places_the_complete_model_on_a_gpu(two_ranks):
    moved = {
        name: any("moved at once" in note for report in two_ranks[name].reports for note in report["notes"])
        for name in ("fp32-ddp_loop-ddp", "fp32-ddp_loop-zero3", "fp32-trainer_run-zero3", "fp32-offload")
    }
    assert [name for name, notes in moved.items() if notes] == ["fp32-ddp_loop-ddp"]


def test_the_laboratory_measures_without_errors_and_races(folder):
    flags = ["--threads=1", "--disable_tqdm", "--output_dir=laboratory", "--seconds_per_point=0.001"]
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
