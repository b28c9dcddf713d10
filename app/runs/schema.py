"""The format of a run folder: its file names, and the keys of each file with the kinds of their values.

    settings.json        every setting of the run, its machines and its software versions
    split.json           the data: file, classes, rows per split, fingerprint
    steps.jsonl          one line per optimizer step
    evaluations.jsonl    one line per evaluation during training
    metrics.json         the results on the test rows; written last, so a folder that has it holds a finished run
    predictions.csv      one line per test row, in file order; see `prediction_columns`
    model/               the trained model, as `save_pretrained` writes it, with a model card
    profile/             with --profile: trace-rank<rank>.json.gz, summary.md and summary.json
    trackers/            with --report_to tensorboard: its files
    checkpoints/         checkpoint-<step>/ (see `checkpoint_files`) and best-<step>/ (weights only)
    .lock                locked as long as a job writes to the folder

The code that writes a run, the code that reads it, and the tests import these names. Do not change them: old runs must
remain readable. A key that older versions did not write is optional.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

RUNS = Path("runs")  # the parent of the run folders without --output_dir: runs/<training path>/<date and time>
LATEST = "latest"  # a symbolic link next to those folders, to the newest one

MODEL_FOLDER = "model"
MODEL_CARD = "README.md"
PREDICTIONS = "predictions.csv"
LOCK = ".lock"

TRACKERS = "trackers"  # a folder
PROFILE = "profile"  # a folder
PROFILE_STAGING = ".profile.tmp"
TRACE = "trace-rank{rank}.json.gz"  # opens at https://ui.perfetto.dev
PROFILE_SUMMARY, PROFILE_TEXT = "summary.json", "summary.md"

# ---- checkpoints ----------------------------------------------------------------------------------------------------

CHECKPOINTS = "checkpoints"
BEST_PREFIX = "best-"
MODEL = "model.safetensors"  # the complete weights, in best-<step>/
SHARDS = "state-{rank}-of-{size}.safetensors"  # what only that rank holds of weights and optimizer state
SCHEDULE, RUN_STATE = "schedule.json", "run_state.json"


def checkpoint_files(world_size: int) -> list[str]:
    """Return the files without which a checkpoint of this many ranks is not complete."""
    return [*(SHARDS.format(rank=rank, size=world_size) for rank in range(world_size)), SCHEDULE, RUN_STATE]


# ---- kinds of values, worded for error messages ---------------------------------------------------------------------

NUMBER = "a number"
INTEGER = "an integer"
TEXT = "a string"
OBJECT = "an object"
NUMBERS = "a list of numbers"  # not empty
TEXTS = "a list of strings"
NAMES = "a list of distinct strings"  # not empty
TEXTS_BY_NAME = "an object of lists of strings"
INTEGERS_BY_NAME = "an object of integers"
INTEGER_ROWS = "a list of lists of integers"

Kinds = Mapping[str, str]


@dataclass(frozen=True)
class JsonFormat:
    """A JSON file of a run folder, or a JSON Lines file, in which the format is that of each line.

    Attributes:
        name: the file's name.
        required: the keys that must be present, and the kinds of their values.
        optional: further keys, which may be missing or null. Unknown keys are allowed.
    """

    name: str
    required: Kinds
    optional: Kinds = field(default_factory=dict)


# ---- JSON files -----------------------------------------------------------------------------------------------------

# From app.model.identity. Older runs lack some of them.
MODEL_IDENTITY = {"model_commit": TEXT, "model_config": OBJECT, "model_code_sha256": TEXT, "tokens_sha256": TEXT}

SETTINGS = JsonFormat(  # the fields of app.settings.Settings, and these
    "settings.json",
    required={"path": TEXT, "world_size": INTEGER, "csv": TEXT, "seed": INTEGER},
    optional={"git_commit": TEXT, "devices": TEXTS, "launchers": TEXTS, "versions": OBJECT}
    | {"kernels": OBJECT}
    | MODEL_IDENTITY
    | {"logical_ranks": INTEGER, "strategy": TEXT, "wrapper": TEXT}
    | {"deepspeed_config": OBJECT}
    | {"threads": INTEGER, "cache_dir": TEXT, "text_column": TEXT, "label_column": TEXT}
    | {"test_size": NUMBER, "validation_size": NUMBER},
)
SPLIT = JsonFormat(
    "split.json",
    required={"fingerprint": TEXT, "n_test": INTEGER, "classes": NAMES},
    optional={"csv": TEXT, "csv_sha256": TEXT, "rows_read": INTEGER, "rows_dropped": OBJECT, "seed": INTEGER}
    | {"test_size": NUMBER, "validation_size": NUMBER, "n_train": INTEGER, "n_validation": INTEGER}
    | {"duplicates": INTEGERS_BY_NAME}
    | {"csv_escape": TEXT},  # missing in runs of the first version, which escaped predictions.csv differently
)
STEPS = JsonFormat(
    "steps.jsonl",
    required={"step": INTEGER, "epoch": NUMBER, "loss": NUMBER, "learning_rate": NUMBER}
    | {"examples": NUMBER, "tokens": NUMBER, "padded_tokens": NUMBER, "seconds": NUMBER},
    optional={"grad_norm": NUMBER},  # null if the step was skipped because of an overflow in fp16
)
EVALUATIONS = JsonFormat(
    "evaluations.jsonl",
    required={"step": INTEGER, "epoch": NUMBER, "rows": TEXT, "accuracy": NUMBER, "loss": NUMBER},
    optional={"n": INTEGER, "f1": NUMBER},
)
METRICS = JsonFormat(
    "metrics.json",
    required={"accuracy": NUMBER, "f1": NUMBER, "loss": NUMBER, "n_test": INTEGER, "train_seconds": NUMBER}
    | {"train_examples_per_second": NUMBER, "peak_memory_bytes": NUMBERS},
    optional={"precision": NUMBER, "recall": NUMBER, "confusion_matrix": INTEGER_ROWS}
    | {"train_tokens_per_second": NUMBER, "padding_fraction": NUMBER, "mfu": NUMBER}
    | {"skipped_steps": INTEGER, "hash": TEXT},  # from app.runs.hashes.hash_run
)

# run_state.json of a checkpoint. Increase the version if a program of the version before must not resume from it.
# Version 2: dropout masks belong to the rows of the global batch.
RUN_STATE_VERSION = 2
RUN_STATE_FORMAT = JsonFormat(
    RUN_STATE,
    required={"path": TEXT, "step": INTEGER, "total_steps": INTEGER, "world_size": INTEGER, "fingerprint": TEXT}
    | {"settings": OBJECT},
    optional={"format_version": INTEGER, "device": TEXT, "torch": TEXT}
    | {"transformers": TEXT, "arithmetic": TEXTS_BY_NAME, "threads": INTEGER}
    | {"totals": OBJECT, "best": OBJECT, "evaluations": INTEGER}
    | MODEL_IDENTITY,
)
TOTALS = JsonFormat(
    "totals",
    required={},
    optional={"train_seconds": NUMBER, "examples": INTEGER, "tokens": INTEGER, "padded_tokens": INTEGER}
    | {"skipped": INTEGER, "skipped_in_a_row": INTEGER},
)
BEST = JsonFormat("best", required={}, optional={"step": INTEGER, "value": NUMBER})

LOGS = (STEPS.name, EVALUATIONS.name)
RESULTS = (METRICS.name, PREDICTIONS)  # in the order in which they are removed: without the first the run is unfinished

# ---- predictions.csv ------------------------------------------------------------------------------------------------


def probability_column(class_name: str) -> str:
    """Return the name of the column that holds the predicted probability of a class."""
    return f"probability_{class_name}"


def prediction_columns(classes: Sequence[str], has_labels: bool = True) -> list[str]:
    """Return the columns of predictions.csv in order, before `app.runs.csv_escape.escape`."""
    labels = ["label"] if has_labels else []
    return ["row", *labels, "predicted", *map(probability_column, classes), "review"]
