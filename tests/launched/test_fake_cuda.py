"""The code for GPUs, on fake ones (`tests/fake_cuda/README.md`): no error, no race, the same bits, few waits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from helpers.architectures import write_model
from helpers.jobs import (
    ON_FAKE_GPUS,
    Job,
    Outcome,
    TrainingRun,
    require_fake_gpus,
    run_many,
    write_subset,
)

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


def counted(path: str, strategy: str, model: str) -> tuple[str, str]:
    """Return the names of two runs, of which the second has two logging intervals more."""
    return f"{'fp32' if model == 'bert' else model}-{path}-{strategy}", f"long_{model}-{path}-{strategy}"


def more_steps(path: str, strategy: str, model: str) -> dict[str, TrainingRun]:
    """Return the second of these runs, and the first one if the model is not that of the other tests."""
    short, long = counted(path, strategy, model)
    flags = [*FLAGS, *QUIET, f"--strategy={strategy}", f"--model={model}"]
    runs = {long: TrainingRun(path, [*flags, f"--max_steps={4 + 2 * LOGGING_STEPS}"])}
    return runs if model == "bert" else runs | {short: TrainingRun(path, flags)}


# What comes before the first "-" in a run's name is its group. All runs of a group have the same bits.
FAST = {
    "fp32-ddp_loop-ddp": run("ddp_loop"),
    "fp32-trainer_run-zero3": run("trainer_run", "--strategy=zero3"),
    "fp32-offload": run("ddp_loop", *OFFLOAD),
    "bf16_hook-2": run("ddp_loop", "--ddp_comm_hook=bf16"),
}
FAST_COUNTED = [("ddp_loop", "ddp", "bert")]
TWO_RANKS = {
    f"fp32-{path}-{name}": run(path, f"--strategy={name}")
    for path, name in product(PATHS, STRATEGIES)
    if f"fp32-{path}-{name}" not in FAST
}
TWO_RANKS |= {
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
    "fp16_hook-2": run("ddp_loop", "--ddp_comm_hook=fp16"),
    "bf16_hook-trainer": run("trainer_run", "--ddp_comm_hook=bf16", "--strategy=zero1"),
    "power_sgd-2": run("ddp_loop", "--ddp_comm_hook=power_sgd", "--logical_ranks=2"),
    "power_sgd-trainer": run("trainer_run", "--ddp_comm_hook=power_sgd", "--logical_ranks=2"),
    "saved-ddp_loop": saved("ddp_loop", "--strategy=zero3"),
    "saved-trainer_run": saved("trainer_run"),
    "saved-resumed-offload": resumed("ddp_loop", *OFFLOAD),
    "saved-resumed-trainer": resumed("trainer_run", "--strategy=zero1"),
    "buckets-2": in_buckets("ddp_loop"),
    "bf16_hook_buckets-2": in_buckets("ddp_loop", "--ddp_comm_hook=bf16"),
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
# A deliberate bug, and how it shows.
FAST_BUGS = {"norm_on_the_cpu": (run("ddp_loop", *OFFLOAD), "error")}
BUGS = {
    "exchange_that_does_not_wait": (in_buckets("ddp_loop"), "race"),
    "memory_that_is_not_recorded": (in_buckets("ddp_loop", "--ddp_comm_hook=bf16"), "race"),
}
SLOW_COUNTED = [
    *((path, strategy, "bert") for path, strategy in product(PATHS, STRATEGIES)),
    *(("ddp_loop", "ddp", model) for model in WAITING_MODELS),
]
SLOW_COUNTED.remove(*FAST_COUNTED)
GROUPS = sorted({name.partition("-")[0] for name in (*FAST, *TWO_RANKS, *ONE_RANK, *FOUR_RANKS, *TF32)})


class Jobs:
    """The folder of all runs, and the outcomes of those that have been trained."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outcomes: dict[str, Outcome] = {}

    def train(self, runs: Mapping[str, TrainingRun], **options: Any) -> None:
        self.outcomes |= run_many(self.folder, runs, fake_gpus=True, **options)


def buggy(bugs: Mapping[str, tuple[TrainingRun, str]]) -> dict[str, TrainingRun]:
    return {name: replace(run, mutation=name) for name, (run, _) in bugs.items()}


@pytest.fixture(scope="module")
def fast(hotel_csv, tmp_path_factory) -> Jobs:
    """One short job of two ranks."""
    require_fake_gpus()
    folder = tmp_path_factory.mktemp("fake-gpus")
    write_subset(hotel_csv, folder / "reviews.csv", 120)
    for model in ("bert", *WAITING_MODELS):
        write_model(folder / model, model)
    jobs = Jobs(folder)
    runs = FAST | buggy(FAST_BUGS)
    for case in FAST_COUNTED:
        runs |= more_steps(*case)
    jobs.train(runs)
    return jobs


@pytest.fixture(scope="module")
def two_ranks(fast) -> Jobs:
    runs = dict(TWO_RANKS)
    for case in SLOW_COUNTED:
        runs |= more_steps(*case)
    fast.train(runs)
    return fast


@pytest.fixture(scope="module")
def one_rank(two_ranks) -> Jobs:
    two_ranks.train(ONE_RANK, ranks=0, job_flags=["--deterministic"])
    return two_ranks


@pytest.fixture(scope="module")
def four_ranks(two_ranks) -> Jobs:
    two_ranks.train(FOUR_RANKS | buggy(BUGS), ranks=4)
    return two_ranks


@pytest.fixture(scope="module")
def two_nodes(two_ranks) -> Jobs:
    two_ranks.train(TWO_NODES, ranks=4, RANKS_PER_NODE="2")
    return two_ranks


def check(jobs: Jobs, names: Iterable[str]) -> None:
    """Assert that runs have neither errors nor races, and that those of a group have the same bits."""
    outcomes = {name: jobs.outcomes[name] for name in names}
    problems = {name: one.problem for name, one in outcomes.items() if one.problem is not None}
    assert not problems, problems
    races = {name: race for name, one in outcomes.items() for report in one.reports for race in report["races"]}
    assert not races, races
    assert all(report["kernels"] for one in outcomes.values() for report in one.reports)


def check_bits(jobs: Jobs) -> None:
    """Assert that all runs of a group so far have the same bits."""
    hashes: dict[str, dict[str, str]] = {}
    for name, outcome in jobs.outcomes.items():
        group = name.partition("-")[0]
        if group in GROUPS and outcome.problem is None:
            hashes.setdefault(group, {})[name] = hash_run(jobs.folder / name)
    different = {group: runs for group, runs in hashes.items() if len(set(runs.values())) > 1}
    assert not different, different


def check_waits(jobs: Jobs, path: str, strategy: str, model: str) -> None:
    """Assert that two logging intervals make the host wait once each, or for each micro-batch if the model waits."""
    runs = counted(path, strategy, model)
    assert [jobs.outcomes[name].problem for name in runs] == [None, None]
    short, long = (Counter(jobs.outcomes[name].reports[0]["waits"]) for name in runs)
    assert (long - short).total() <= 2 + MICRO_BATCHES * (model in WAITING_MODELS), long - short


def test_both_paths_train_without_errors_and_races(fast):
    check(fast, FAST)
    check_bits(fast)


@pytest.mark.parametrize("case", FAST_COUNTED, ids="-".join)
def test_the_host_waits_once_per_logging_interval(fast, case):
    check_waits(fast, *case)


@pytest.mark.parametrize("bug", FAST_BUGS)
def test_a_deliberate_bug_is_detected(fast, bug):
    assert shows(fast.outcomes[bug], FAST_BUGS[bug][1])


def assert_never_complete(jobs: Jobs, sharded: Iterable[str], complete: Iterable[str]) -> None:
    """Assert which runs have placed the complete model on a GPU, for which it may be too large."""
    moved = {
        name: [note for report in jobs.outcomes[name].reports for note in report["notes"] if "moved at once" in note]
        for name in (*sharded, *complete)
    }
    assert {name for name, notes in moved.items() if notes} == set(complete), moved


def test_zero3_never_places_the_complete_model_on_a_gpu(fast):
    assert_never_complete(fast, ["fp32-trainer_run-zero3", "fp32-offload"], ["fp32-ddp_loop-ddp"])


def shows(outcome: Outcome, how: str) -> bool:
    if how == "error":
        return "FakeCudaError" in str(outcome.problem)
    return outcome.problem is None and all(report["races"] for report in outcome.reports)


def test_all_strategies_precisions_and_hooks_train_without_errors_and_races(two_ranks):
    check(two_ranks, TWO_RANKS)
    check_bits(two_ranks)


@pytest.mark.parametrize("case", SLOW_COUNTED, ids="-".join)
def test_the_host_waits_once_per_logging_interval_with_each_strategy(two_ranks, case):
    check_waits(two_ranks, *case)


def test_one_rank_trains_the_same_bits_with_deterministic_algorithms(one_rank):
    check(one_rank, ONE_RANK)
    check_bits(one_rank)


def test_four_ranks_train_the_same_bits(four_ranks):
    check(four_ranks, FOUR_RANKS)
    check_bits(four_ranks)


@pytest.mark.parametrize("bug", BUGS)
def test_a_deliberate_bug_of_four_ranks_is_detected(four_ranks, bug):
    assert shows(four_ranks.outcomes[bug], BUGS[bug][1])


def test_two_nodes_of_two_ranks_train_the_same_bits(two_nodes):
    check(two_nodes, TWO_NODES)
    check_bits(two_nodes)
    groups = {note for report in two_nodes.outcomes["buckets-nodes"].reports for note in report["notes"]}
    assert any(note.endswith(" in a group of 2") for note in groups), groups


def test_both_paths_multiply_in_tf32_on_request_and_record_it(two_ranks):
    two_ranks.train(TF32, job_flags=["--tf32"])
    check(two_ranks, TF32)
    check_bits(two_ranks)
    used = {
        name: json.loads((two_ranks.folder / name / "settings.json").read_text())["kernels"]["fp32_matmul_precision"]
        for name in (*TF32, "fp32-ddp_loop-ddp", "fp32-trainer_run-ddp")
    }
    assert used == {name: "high" if name in TF32 else "highest" for name in used}


def test_the_laboratory_measures_without_errors_and_races(fast):
    flags = ["--threads=1", "--disable_tqdm", "--output_dir=laboratory", "--seconds_per_point=0.001"]
    flags += ["--csv=reviews.csv", "--max_length=16", "--train_batch_size=8", "--model=bert"]
    flags += ["--sections", "breakdown", "no_sync", "compression"]  # the others train in the same way
    command = [ON_FAKE_GPUS, "--report=reports", "app.bench.communication", *flags]
    with Job(*map(str, command), cwd=fast.folder) as job:
        done = job.finish()
    assert done.status == 0, done.err
    for rank in range(2):
        report = json.loads((fast.folder / "reports" / f"report-{rank}.json").read_text())
        assert report["races"] == {}
        assert any(note.startswith("nccl ") for note in report["notes"])
        assert not any("without device_id" in note for note in report["notes"])
