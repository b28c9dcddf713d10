"""Any number of ranks and any strategy give the same bits, in both paths; deliberate bugs do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.architectures import write_model
from helpers.jobs import TrainingRun, require_success, write_subset
from helpers.marks import slow_after

from app.runs.hashes import hash_run

pytestmark = pytest.mark.launched
PATHS, STRATEGIES = ("ddp_loop", "trainer_run"), ("ddp", "zero1", "zero2", "zero3")
# 300 reviews: 8 validation and 30 test rows, so that neither can be divided equally. With dropout and clipping.
FLAGS = ["--csv=reviews.csv", "--logical_ranks=4", "--train_batch_size=24", "--max_steps=8", "--max_length=24"]
FLAGS += ["--validation_size=0.03", "--eval_strategy=steps", "--eval_steps=3", "--eval_batch_size=8"]
FLAGS += ["--save_strategy=steps", "--save_steps=5", "--dropout=0.1", "--max_grad_norm=0.5", "--warmup_steps=0"]
SMALL = ["--model=bert"]  # of 60 KB; the model of the other runs fills several of DDP's buckets
VARIANTS = {
    "": [],
    "-bf16": [*SMALL, "--bf16"],
    "-accumulation": [*SMALL, "--gradient_accumulation_steps=3", "--train_sampling_strategy=random"],
    "-checkpointing": ["--activation_checkpointing"],
    "-fp16": [*SMALL, "--precision=fp16", "--learning_rate=1e-2"],
}
# Each variant with two ranks, with two of the strategies; with four ranks, another one.
FAST_STRATEGIES, SLOW_STRATEGIES = ("ddp", "zero1", "zero3"), ("zero2",)
FAST_CELLS = [("-bf16", "zero3"), ("-accumulation", "ddp"), ("-fp16", "zero3")]
SLOW_CELLS = [("-bf16", "ddp"), ("-accumulation", "zero3"), ("-fp16", "ddp")]
SLOW_CELLS += [("-checkpointing", "ddp"), ("-checkpointing", "zero3")]
OTHER_STRATEGIES = {"-bf16": "zero1", "-accumulation": "zero2", "-checkpointing": "zero2", "-fp16": "zero1"}
BUGS = {"swapped_leaves": (1, 4), "physical_dropout": (1, 2), "fp32_norm": (1, 2)}  # and the ranks that they show at


def run_name(path: str, ranks: int, strategy: str, variant: str = "") -> str:
    return f"{path}-{ranks}-{strategy}{variant}"


def uninterrupted(
    ranks: int, variants: list[str], paths: tuple[str, ...] = PATHS, strategies: tuple[str, ...] = STRATEGIES
) -> dict[str, TrainingRun]:
    return {
        run_name(path, ranks, strategy, variant): TrainingRun(
            path, [*FLAGS, *VARIANTS[variant], f"--strategy={strategy}"]
        )
        for variant in variants
        for path in paths
        for strategy in strategies
    }


def with_bugs(ranks: int) -> dict[str, TrainingRun]:
    strategy = "ddp" if ranks == 1 else "zero3"
    return {
        f"{bug}-{ranks}": TrainingRun("ddp_loop", [*FLAGS, *SMALL, f"--strategy={strategy}"], mutation=bug)
        for bug, where in BUGS.items()
        if ranks in where
    }


def write_inputs(folder: Path, csv: Path) -> None:
    write_subset(csv, folder / "reviews.csv", 300)
    write_model(folder / "bert", "bert")


ONE_RANK = uninterrupted(1, ["", *dict(FAST_CELLS)], PATHS[:1], ("ddp",))
ONE_RANK |= uninterrupted(1, [""], PATHS[1:], ("zero3",))
SLOW_ONE_RANK = uninterrupted(1, ["-checkpointing"], PATHS[:1], ("ddp",))
TWO_RANKS = uninterrupted(2, [""], strategies=FAST_STRATEGIES)
for variant, strategy in FAST_CELLS:
    TWO_RANKS |= uninterrupted(2, [variant], PATHS[:1], (strategy,))
SLOW_TWO_RANKS = uninterrupted(2, [""], strategies=SLOW_STRATEGIES)
SLOW_TWO_RANKS |= uninterrupted(2, ["-fp16", "-checkpointing"], PATHS[1:], ("zero3",))
for variant, strategy in SLOW_CELLS:
    SLOW_TWO_RANKS |= uninterrupted(2, [variant], PATHS[:1], (strategy,))
FOUR_RANKS = uninterrupted(4, [""], PATHS[:1], ("ddp",))
# With two ranks, each path trains with each strategy; with four, on one node and on two, one of the paths does.
ON_ONE_NODE = dict(zip(STRATEGIES, (*PATHS, *PATHS), strict=True))
ON_TWO_NODES = dict(zip(STRATEGIES, (*PATHS[::-1], *PATHS[::-1]), strict=True))
SLOW_FOUR_RANKS, TWO_NODES = {}, uninterrupted(4, ["-fp16"], PATHS[:1], ("zero1", "zero3"))
for strategy in STRATEGIES:
    SLOW_FOUR_RANKS |= uninterrupted(4, [""], (ON_ONE_NODE[strategy],), (strategy,))
    TWO_NODES |= uninterrupted(4, [""], (ON_TWO_NODES[strategy],), (strategy,))
for variant, strategy in OTHER_STRATEGIES.items():
    SLOW_FOUR_RANKS |= uninterrupted(4, [variant], PATHS[:1], (strategy,))
EIGHT = TrainingRun("ddp_loop", [*FLAGS, "--logical_ranks=8"])
SHARED_RUNS = {
    "one_rank": ONE_RANK | with_bugs(1),
    "two_ranks": TWO_RANKS | with_bugs(2),
    "four_ranks": FOUR_RANKS,
}
SLOW_SHARED_RUNS = {
    "one_rank": SLOW_ONE_RANK | {"eight-1": EIGHT},
    "two_ranks": SLOW_TWO_RANKS,
    "four_ranks": SLOW_FOUR_RANKS | with_bugs(4),
    "eight_ranks": {"eight": EIGHT},
    "two_nodes": {f"two-nodes-{name}": run for name, run in TWO_NODES.items()},
}


@pytest.fixture(scope="module")
def after(trained_by, shared_folder) -> Callable[[str], Path]:
    """A function that returns the folder of all runs once a job has trained its own: `after("two_ranks")`."""

    def train(job: str) -> Path:
        require_success(trained_by(job))
        return shared_folder

    return train


@pytest.fixture(scope="module")
def one_rank(after) -> Path:
    return after("one_rank")


@pytest.fixture(scope="module")
def two_ranks(after) -> Path:
    return after("two_ranks")


@pytest.fixture(scope="module")
def four_ranks(after) -> Path:
    return after("four_ranks")


@pytest.fixture(scope="module")
def eight_ranks(after) -> Path:
    return after("eight_ranks")


@pytest.fixture(scope="module")
def two_nodes(after) -> Path:
    return after("two_nodes")


def reference(folder: Path, variant: str = "") -> str:
    return hash_run(folder / run_name("ddp_loop", 1, "ddp", variant))


@pytest.mark.parametrize("strategy", slow_after(len(FAST_STRATEGIES), FAST_STRATEGIES + SLOW_STRATEGIES))
@pytest.mark.parametrize("path", PATHS)
def test_two_ranks_train_like_one(two_ranks, path, strategy):
    assert hash_run(two_ranks / run_name(path, 2, strategy)) == reference(two_ranks)


@pytest.mark.parametrize(
    ("variant", "strategy"),
    slow_after(len(FAST_CELLS), FAST_CELLS + SLOW_CELLS),
)
def test_precision_accumulation_and_checkpointing_do_not_depend_on_the_ranks(two_ranks, variant, strategy):
    assert hash_run(two_ranks / run_name("ddp_loop", 2, strategy, variant)) == reference(two_ranks, variant)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "strategy"), OTHER_STRATEGIES.items())
def test_nor_with_four_ranks_and_the_other_strategies(four_ranks, variant, strategy):
    assert hash_run(four_ranks / run_name("ddp_loop", 4, strategy, variant)) == reference(four_ranks, variant)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["-fp16", "-checkpointing"])
def test_the_other_path_trains_the_same_with_loss_scaling_and_with_activation_checkpointing(two_ranks, variant):
    assert hash_run(two_ranks / run_name("trainer_run", 2, "zero3", variant)) == reference(two_ranks, variant)


@pytest.mark.slow
def test_activation_checkpointing_changes_no_bit(one_rank):
    assert reference(one_rank, "-checkpointing") == reference(one_rank)
    assert len({reference(one_rank, variant) for variant in VARIANTS}) == len(VARIANTS) - 1


FOUR_RANK_CELLS = [
    pytest.param(path, strategy, marks=[] if strategy == "ddp" else pytest.mark.slow)
    for strategy, path in ON_ONE_NODE.items()
]


@pytest.mark.slow
def test_eight_ranks_train_like_one(eight_ranks):
    assert hash_run(eight_ranks / "eight") == hash_run(eight_ranks / "eight-1") != reference(eight_ranks)


@pytest.mark.parametrize(("path", "strategy"), FOUR_RANK_CELLS)
def test_four_ranks_train_like_one(four_ranks, path, strategy):
    assert hash_run(four_ranks / run_name(path, 4, strategy)) == reference(four_ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "path"), ON_TWO_NODES.items())
def test_two_nodes_train_like_one_rank(two_nodes, path, strategy):
    assert hash_run(two_nodes / f"two-nodes-{run_name(path, 4, strategy)}") == reference(two_nodes)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_two_nodes_scale_the_loss_like_one_rank(two_nodes, strategy):
    name = f"two-nodes-{run_name('ddp_loop', 4, strategy, '-fp16')}"
    assert hash_run(two_nodes / name) == reference(two_nodes, "-fp16")


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=[pytest.mark.slow] if 4 in where else []) for bug, where in BUGS.items()]
)
def test_a_deliberate_bug_is_detected(request, bug):
    few, many = BUGS[bug]
    folder = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[many])
    assert hash_run(folder / f"{bug}-{few}") != hash_run(folder / f"{bug}-{many}")
