"""Both training paths are bitwise identical for any architecture.

Runs share jobs with those of other files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from helpers.architectures import CONFIGS, write_hub_cache, write_model
from helpers.jobs import Outcome, TrainingRun, require_success

from app.report.bitwise import first_difference
from app.runs.reader import read_run

pytestmark = pytest.mark.launched
PATHS = ("ddp_loop", "trainer_run")
FLAGS = ["--csv=reviews.csv", "--max_length=32", "--train_batch_size=12", "--max_steps=6", "--warmup_steps=0"]
FLAGS += ["--eval_strategy=steps", "--eval_steps=4", "--validation_size=0.2", "--logging_steps=2"]
FLAGS += ["--save_strategy=no"]
BUCKETS = {"unset": [], "25": ["--ddp_bucket_cap_mb=25"], "1": ["--ddp_bucket_cap_mb=1"]}
EXTRA = {"xlnet": ["--ddp_find_unused_parameters"]}
FAST = ("bert", "batch_norm")
ALL = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in CONFIGS]


def write_reviews(folder: Path) -> None:
    """Reviews of three classes, which a tiny model can distinguish."""
    reviews = [("差。", "好，", "一般")[i % 3] * (1 + i % 17) + f"第{i}次" for i in range(90)]
    pd.DataFrame({"label": [("bad", "good", "mixed")[i % 3] for i in range(90)], "review": reviews}).to_csv(
        folder / "reviews.csv", index=False
    )


SHORT = ["--max_steps=1", "--eval_strategy=no"]
VARIANTS = {  # runs of one step each, with unusual flags, model folders or tokenizers
    "no_mask": ["--model=no_mask"],
    "more_inputs": ["--model=more_inputs"],
    "unused": ["--model=unused"],
    "bucket_25": ["--model=gpt2", "--ddp_bucket_cap_mb=25"],
    "bucket_1": ["--model=gpt2", "--ddp_bucket_cap_mb=1"],
    "main": ["--model=someone/model"],
    "branch": ["--model=someone/model", "--revision=branch"],
}


def write_inputs(folder: Path, csv: Path) -> None:
    write_reviews(folder)
    for name in CONFIGS:
        write_model(folder / name, name)
    write_model(folder / "no_mask", "bert", model_input_names=["input_ids"])
    write_model(folder / "more_inputs", "distilbert", model_input_names=["input_ids", "token_type_ids"])
    write_model(folder / "unused", "xlnet")
    write_hub_cache(folder.parent / "hub", "someone/model", main="a" * 40, branch="b" * 40)


def run(name: str, path: str, *flags: str) -> TrainingRun:
    return TrainingRun(path, [*FLAGS, f"--model={name}", *EXTRA.get(name, []), *flags], inspect=True)


def variants(*names: str) -> dict[str, TrainingRun]:
    return {
        f"{name}-{path}": TrainingRun(path, [*FLAGS, *SHORT, *VARIANTS[name]], inspect=True)
        for name in names
        for path in PATHS
    }


FAST_RUNS = {f"{name}-{path}": run(name, path) for name in FAST for path in PATHS} | variants("no_mask", "more_inputs")
SLOW_RUNS = {f"{name}-{path}": run(name, path) for name in CONFIGS if name not in FAST for path in PATHS}
SLOW_RUNS |= variants("unused", "bucket_25", "bucket_1", "main", "branch")
SLOW_RUNS |= {
    f"unused-{strategy}-{path}": TrainingRun(path, [*FLAGS, *SHORT, *VARIANTS["unused"], f"--strategy={strategy}"])
    for strategy in ("zero1", "zero2", "zero3")
    for path in PATHS
}
SHARED_RUNS = {"two_ranks": FAST_RUNS}
SLOW_SHARED_RUNS = {
    "two_ranks": SLOW_RUNS,
    # With three ranks, the order in which gradients are added depends on their position in a bucket.
    "three_ranks": {
        f"{path}-{name}": TrainingRun(path, [*FLAGS, "--eval_strategy=no", *more])
        for name, more in BUCKETS.items()
        for path in PATHS
    },
}


@pytest.fixture(scope="module")
def trained(trained_by, shared_folder) -> Callable[[str], tuple[Path, dict[str, Outcome]]]:
    """A function that returns the folder and the outcomes of an architecture or a variant."""

    def find(name: str) -> tuple[Path, dict[str, Outcome]]:
        outcomes = trained_by("two_ranks")
        return shared_folder, {run: outcome for run, outcome in outcomes.items() if run.startswith(f"{name}-")}

    return find


def difference(a: Path, b: Path) -> str | None:
    """The first difference of two runs, evaluations included."""
    evaluations = [(folder / "evaluations.jsonl").read_text() for folder in (a, b)]
    if evaluations[0] != evaluations[1]:
        return f"evaluations: {evaluations}"
    return first_difference(read_run(a), read_run(b))


@pytest.mark.parametrize("name", ALL)
def test_both_paths_train_an_architecture_bitwise_identically(trained, name):
    folder, outcomes = trained(name)
    assert {f"{name}-{path}" for path in PATHS} <= outcomes.keys()
    require_success(outcomes)  # resumed runs, too
    differences = {run: difference(folder / f"{name}-ddp_loop", folder / run) for run in outcomes}
    assert differences == dict.fromkeys(outcomes)


@pytest.mark.parametrize("name", ALL)
def test_training_changes_neither_config_nor_tokenizer(trained, name):
    _, outcomes = trained(name)
    assert {run: outcome.inspection["changes"] for run, outcome in outcomes.items()} == {run: [] for run in outcomes}


@pytest.mark.parametrize("name", ["no_mask", "more_inputs"])
def test_a_tokenizer_returns_the_inputs_that_the_model_accepts(trained, name):
    folder, outcomes = trained(name)
    require_success(outcomes)
    a, b = (read_run(folder / run) for run in outcomes)
    assert first_difference(a, b) is None
    assert a.steps[0]["tokens"] < a.steps[0]["padded_tokens"], "padding is masked"


@pytest.mark.slow
def test_parameters_without_a_gradient_are_one_line_in_the_first_step(trained):
    _, outcomes = trained("unused")
    assert len(outcomes) == 8, "the answer does not depend on the path or the strategy"
    (problem,) = {outcome.problem for outcome in outcomes.values()}
    assert problem.startswith("AgreedError: ")
    assert "transformer.mask_emb" in problem
    assert "add --ddp_find_unused_parameters" in problem
    assert len(problem.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "megabytes", "small_first"), [("gpt2", 25, True), ("bucket_25", 25, False), ("bucket_1", 1, False)]
)
def test_ddp_is_configured_the_same_in_both_paths(trained, name, megabytes, small_first):
    _, outcomes = trained(name)
    ours, theirs = (outcomes[f"{name}-{path}"].inspection["ddp"] for path in PATHS)
    assert ours == theirs
    assert {"find_unused_parameters", "broadcast_buffers", "gradient_as_bucket_view", "static_graph"} <= set(ours)
    assert (ours["bucket_bytes_cap"], ours["bucket_bytes_cap_default"]) == (megabytes * 2**20, small_first)


@pytest.mark.slow
def test_a_run_records_the_commit_of_its_model(trained):
    for branch, commit in (("main", "a" * 40), ("branch", "b" * 40)):
        folder, outcomes = trained(branch)
        require_success(outcomes)
        for run in outcomes:
            assert json.loads((folder / run / "settings.json").read_text())["model_commit"] == commit
            assert f"at commit `{commit}`" in (folder / run / "model" / "README.md").read_text()
    weights = [
        (folder / f"{name}-ddp_loop" / "model" / "model.safetensors").read_bytes() for name in ("main", "branch")
    ]
    assert weights[0] != weights[1]


@pytest.mark.slow
def test_any_bucket_size_is_bitwise_identical_at_three_ranks(trained_by, shared_folder):
    require_success(trained_by("three_ranks"))
    for name in BUCKETS:
        assert first_difference(*(read_run(shared_folder / f"{path}-{name}") for path in PATHS)) is None
