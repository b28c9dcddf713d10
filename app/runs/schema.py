"""The format of a run folder: its file names.

    settings.json        every setting of the run, its machines and its software versions
    split.json           the data: file, classes, rows per split, fingerprint
    steps.jsonl          one line per optimizer step
    evaluations.jsonl    one line per evaluation during training
    tensors.jsonl        with --trace_tensors: the hash of each tensor of some steps; see app/tracing.py
    metrics.json         the results on the test rows; written last, so a folder that has it holds a finished run
    predictions.csv      one line per test row, in file order; see `prediction_columns`
    model/               the trained model, as `save_pretrained` writes it, with a model card
    profile/             with --profile: trace-rank<rank>.json.gz, summary.md and summary.json
    trackers/            with --report_to tensorboard: its files
    checkpoints/         checkpoint-<step>/ and best-<step>/ (weights only); see app/checkpoint
    .lock                locked as long as a job writes to the folder

The code that writes a run, the code that reads it, and the tests import these names. Do not change them: old runs must
remain readable. A key that older versions did not write is optional.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

RUNS = Path("runs")  # the parent of the run folders without --output_dir: runs/<training path>/<date and time>
LATEST = "latest"  # a symbolic link next to those folders, to the newest one

MODEL_FOLDER, MODEL_CARD = "model", "README.md"
PREDICTIONS, LOCK = "predictions.csv", ".lock"

TRACKERS, PROFILE = "trackers", "profile"  # folders
TRACE = "trace-rank{rank}.json.gz"  # opens at https://ui.perfetto.dev
PROFILE_SUMMARY, PROFILE_TEXT = "summary.json", "summary.md"

CHECKPOINTS, BEST_PREFIX = "checkpoints", "best-"
MODEL = "model.safetensors"  # the weights in model/
SHARDS = "state-{rank}-of-{size}.safetensors"  # what only that rank holds of weights and optimizer state
SCHEDULE, RUN_STATE = "schedule.json", "run_state.json"

SETTINGS, SPLIT, METRICS = Path("settings.json"), Path("split.json"), Path("metrics.json")
STEPS, EVALUATIONS, TENSORS = Path("steps.jsonl"), Path("evaluations.jsonl"), Path("tensors.jsonl")
LOGS = STEPS, EVALUATIONS, TENSORS


def probability_column(class_name: str) -> str:
    """Return the name of the column that holds the predicted probability of a class."""
    return f"probability_{class_name}"


def prediction_columns(classes: Sequence[str], has_labels: bool = True) -> list[str]:
    """Return the columns of predictions.csv in order, before `app.runs.csv_escape.escape`."""
    labels = ["label"] if has_labels else []
    return ["row", *labels, "predicted", *map(probability_column, classes), "review"]
