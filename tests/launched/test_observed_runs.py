"""Observed runs: `--trace_tensors`, `--profile` and TensorBoard change no result, and get all that they should.

tests/profiling has one rank, both kinds of strategies and the arithmetic of the summary; tests/record has trackers that
fail.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.architectures import write_model
from helpers.jobs import TrainingRun, read_steps, require_success, write_subset
from launched.shared_jobs import SharedRuns

from app.diff import read_trace
from app.equality import first_difference_of_traces
from app.runs.hashes import hash_results
from app.runs.reader import read_run
from app.runs.schema import TENSORS, TRACKERS

pytestmark = pytest.mark.launched
FAULTY = str(Path(__file__).with_name("faulty.py"))
# Two micro-batches of three rows for each logical rank, padded to different lengths. An evaluation between the traced
# steps, whose tensors are not traced, and a checkpoint.
FLAGS = ["--logical_ranks=4", "--train_batch_size=24", "--gradient_accumulation_steps=2", "--max_steps=4"]
FLAGS += ["--max_length=24", "--dropout=0.1", "--max_grad_norm=0.5", "--warmup_steps=0"]
FLAGS += ["--eval_strategy=steps", "--eval_steps=2", "--save_strategy=steps", "--save_steps=2"]
INPUTS, TRACED = ["--csv=reviews.csv", "--model=bert"], "--trace_tensors=2:3"
FP16 = [*FLAGS, *INPUTS, TRACED, "--precision=fp16"]
TIED = [*FLAGS, *INPUTS, TRACED, "--model=bart", "--precision=bf16"]
RUN = [*FLAGS, *INPUTS, TRACED]
NINE = [*RUN, "--max_steps=9", "--eval_steps=6"]  # the evaluation is between profiled steps
SHARED_RUNS: SharedRuns = {
    "one_rank": {
        "reference": TrainingRun("ddp_loop", RUN),
        "untraced": TrainingRun("ddp_loop", [*FLAGS, *INPUTS]),
        "reference-recomputed": TrainingRun("trainer_run", [*RUN, "--strategy=zero3", "--activation_checkpointing"]),
        "reference-resumed": TrainingRun(
            "ddp_loop", [*RUN, "--resume_from_checkpoint=reference/checkpoints/checkpoint-2"]
        ),
        "fp16": TrainingRun("ddp_loop", FP16, loss_scale=2.0**22),  # which overflows
        "tied": TrainingRun("ddp_loop", TIED),
    },
    "two_ranks": {
        "reference-zero1": TrainingRun("ddp_loop", [*RUN, "--strategy=zero1"]),
        "reference-zero2": TrainingRun("trainer_run", [*RUN, "--strategy=zero2"]),
        "fp16-zero3": TrainingRun("trainer_run", [*FP16, "--strategy=zero3"], loss_scale=2.0**22),
        "tied-zero3": TrainingRun("ddp_loop", [*TIED, "--strategy=zero3"]),
    },
}
SLOW_SHARED_RUNS: SharedRuns = {
    "two_ranks": {
        "nine": TrainingRun("ddp_loop", NINE),
        "nine-observed": TrainingRun(
            "trainer_run", [*NINE, "--strategy=zero3", "--logging_steps=4", "--profile=3", "--report_to=tensorboard"]
        ),
    },
    "four_ranks": {
        "reference-ddp4": TrainingRun("trainer_run", RUN),
        "reference-zero3": TrainingRun("ddp_loop", [*RUN, "--strategy=zero3"]),
    },
}


def write_inputs(folder: Path, csv: Path) -> None:
    write_subset(csv, folder / "reviews.csv", 60)
    write_model(folder / "bert", "bert")
    write_model(folder / "bart", "bart")


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "tensors.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("job", ["one_rank", "two_ranks", pytest.param("four_ranks", marks=pytest.mark.slow)])
def test_traces_and_results_depend_on_neither_ranks_nor_strategy_nor_path(trained_by, shared_folder, job):
    require_success(trained_by("one_rank"))
    outcomes = trained_by(job)
    require_success(outcomes)
    assert not (shared_folder / "untraced" / "tensors.jsonl").exists()
    assert hash_results(shared_folder / "untraced") == hash_results(shared_folder / "reference")
    for name in outcomes.keys() - {"untraced"}:
        run, reference = shared_folder / name, shared_folder / name.partition("-")[0]
        assert (run / "tensors.jsonl").read_bytes() == (reference / "tensors.jsonl").read_bytes(), name
        assert hash_results(run) == hash_results(reference), name


def test_a_trace_has_each_tensor_once_in_the_order_of_a_step(trained_by, shared_folder):
    require_success(trained_by("one_rank"))
    lines = lines_of(shared_folder / "reference")
    names = [tuple(line[key] for key in ("step", "phase", "logical_rank", "micro_batch", "name")) for line in lines]
    assert len({*names}) == len(names)
    step = [line for line in lines if line["step"] == 2]
    assert [line["name"] for line in lines if line["step"] == 3] == [line["name"] for line in step]
    micro_batches = [(rank, number) for rank in range(4) for number in range(2)]
    phases = [(place, phase) for place in micro_batches for phase in ("forward", "gradient")]
    phases += [((None, None), phase) for phase in ("summed gradient", "parameter", "moment")]
    found = [((line["logical_rank"], line["micro_batch"]), line["phase"]) for line in step]
    assert [*dict.fromkeys(found)] == phases
    assert found == sorted(found, key=phases.index)
    outputs = [line["name"] for line in step if line["phase"] == "forward"]
    assert outputs[0] == "bert.embeddings.word_embeddings"
    assert outputs[-2:] == ["BertForSequenceClassification[0]", "BertForSequenceClassification[1]"]
    overflows = lines_of(shared_folder / "fp16")
    assert {line["phase"] for line in overflows if line["norm"] is None} >= {"gradient", "summed gradient"}


def test_one_flipped_bit_of_one_gradient_is_the_first_difference(trained_by, shared_folder, launch, tmp_path):
    require_success(trained_by("one_rank"))
    name = "bert.encoder.layer.0.attention.self.query.weight"
    inputs = [f"--csv={shared_folder / 'reviews.csv'}", f"--model={shared_folder / 'bert'}", TRACED, "--threads=1"]
    flags = [*FLAGS, *inputs, "--use_cpu", "--output_dir=flipped"]
    done = launch(FAULTY, "ddp_loop", "flip_bit", *flags, ranks=2, NAME=name, STEP="3")
    assert done.status == 0, done.err
    traces = (read_trace(folder / TENSORS) for folder in (shared_folder / "reference", tmp_path / "flipped"))
    _, difference = first_difference_of_traces(*traces)
    assert difference is not None
    assert difference.startswith(f"step 3, logical rank 2, micro-batch 0: `{name}` differs first among the gradients")


@pytest.mark.slow
def test_a_profile_has_the_steps_of_every_rank(trained_by, shared_folder):
    require_success(trained_by("two_ranks"))
    profile = shared_folder / "nine-observed" / "profile"
    traces = [f"trace-rank{rank}.json.gz" for rank in range(2)]
    assert {file.name for file in profile.iterdir()} == {*traces, "summary.json", "summary.md"}
    summary = json.loads((profile / "summary.json").read_text())
    assert summary["steps"] == [5, 6, 7]
    assert [len(steps) for steps in summary["ranks"]] == [3, 3]
    for rank, name in enumerate(traces):
        with gzip.open(profile / name) as file:
            trace = json.load(file)
        assert trace["distributedInfo"]["rank"] == rank
        names = [event["name"] for event in trace["traceEvents"]]
        assert len([name for name in names if name.startswith("gloo:")]) >= 3
        # With four micro-batches per step on each rank, the trace has those of these three steps and of nothing else.
        assert names.count("micro-batch") == 12


@pytest.mark.slow
def test_tensorboard_gets_each_value_once_and_in_full_precision(trained_by, shared_folder):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    require_success(trained_by("two_ranks"))
    observed, logged = shared_folder / "nine-observed", {}
    for file in (observed / TRACKERS / "tensorboard").glob("events.*"):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.tag.startswith(("train/", "eval/", "final/")):
                    assert (value.tag, event.step) not in logged, "logged twice"
                    logged[value.tag, event.step] = make_ndarray(value.tensor).item()
    for step in read_steps(observed):
        number = step.pop("step")
        assert {name: logged[f"train/{name}", number] for name in step} == step
    assert logged["eval/accuracy", 9] == read_run(observed).metrics["accuracy"] == logged["final/accuracy", 9]
