"""Why two runs differ: exactly the recorded differences that may explain it, and a remedy that removes them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from app.report.explanation import explain
from app.runs.reader import Run

STEP, PREDICTION, WEIGHTS = "step 1: the loss is 0.5", "prediction for row 3: the class is 1", "weights: tensor 'x'"
SETTINGS = {"path": "ddp_loop", "world_size": 2, "devices": ["cpu", "cpu"], "learning_rate": 1e-3, "output_dir": "a"}
H100, A10 = ({"devices": [name], "world_size": 1} for name in ("NVIDIA H100 NVL", "NVIDIA A10"))
BEST = {"load_best_model_at_end": True}
# What is named of both runs, the first difference, and the settings that they recorded besides those above.
EXPLAINED = [
    # No number of logical ranks, which is a power of two, fits both. tests/launched/test_compare.py has one that does.
    ("ranks 3 and 1, logical ranks 3 and 1", STEP, {"world_size": 3}, {"world_size": 1}),
    (
        "learning_rate 0.1 and 0.001, dropout not set and 0.1, a_new_setting 1 and 2, torch 2.13.0 and 2.11.0, "
        "kernels.instructions AVX512 and AVX2, kernels.MKL_CBWR not set and AVX2",
        STEP,
        {"learning_rate": 0.1, "dropout": None, "a_new_setting": 1, "versions": {"torch": "2.13.0"}}
        | {"kernels": {"cpu": "X", "instructions": "AVX512", "MKL_CBWR": None}},
        {"dropout": 0.1, "a_new_setting": 2, "versions": {"torch": "2.11.0"}}
        | {"kernels": {"cpu": "X", "instructions": "AVX2", "MKL_CBWR": "AVX2"}},
    ),
    (
        f"tokens {'a' * 39}… and {'b' * 39}…, commit of this program c and d, commit of the model e and f, "
        "model_config.act gelu and relu",
        STEP,
        {"tokens_sha256": "a" * 64, "git_commit": "c", "model_commit": "e", "model_config": {"act": "gelu", "n": 2}},
        {"tokens_sha256": "b" * 64, "git_commit": "d", "model_commit": "f", "model_config": {"act": "relu", "n": 2}},
    ),
    ("devices NVIDIA H100 NVL and NVIDIA A10", STEP, H100 | {"deterministic": True}, A10 | {"deterministic": True}),
    (
        "threads 1 and 2, GPUs were used without --deterministic, which may give different results each time; "
        "start both with --threads 1 --deterministic",
        STEP,
        H100 | {"threads": 1},
        H100 | {"threads": 2},
    ),
    # Settings of the evaluation explain other predictions, and when the weights are the best, but no other steps.
    ("eval_batch_size 8 and 64", PREDICTION, {"eval_batch_size": 8}, {"eval_batch_size": 64}),
    ("eval_steps 5 and 6", WEIGHTS, BEST | {"eval_steps": 5}, BEST | {"eval_steps": 6}),
]


def explained(a: dict, b: dict, difference: str = STEP) -> str:
    return explain(*(Run(Path("run"), SETTINGS | c, {}, [], [], {}, pd.DataFrame()) for c in (a, b)), difference)


@pytest.mark.parametrize(("named", "difference", "a", "b"), EXPLAINED)
def test_a_recorded_difference_is_named_with_its_remedy(named, difference, a, b):
    assert explained(a, b, difference) == f"trained differently: {named}"


def test_differences_without_effect_or_with_unknown_values_are_not_named():
    a = {"world_size": 1, "devices": ["cpu"], "logical_ranks": 2, "strategy": "zero3", "launchers": ["host:1"]}
    a |= {"command": "python -m app.ddp_loop", "date": "2026-11-26"}
    b = {"world_size": 2, "logical_ranks": 2, "path": "trainer_run", "launchers": ["host:2"], "bf16": True}
    a |= {"save_steps": 5, "output_dir": "x", "logging_steps": 3, "bf16": False, "eval_steps": 5, "eval_batch_size": 8}
    b |= {"save_steps": 6, "output_dir": "y", "logging_steps": 4, "eval_steps": 6, "eval_batch_size": 9}
    b |= {"command": "python -m app.trainer_run", "date": "2026-11-27"}
    # Unknown in one of the runs, which an earlier version wrote, or which were started elsewhere.
    a |= {"threads": None, "git_commit": None, "model_commit": "a", "model_config": {"_name_or_path": "x"}}
    b |= {"threads": 2, "git_commit": "b", "model_commit": None, "model_config": {"_name_or_path": "y", "act": "relu"}}
    b |= {"model_code_sha256": "a", "tokens_sha256": "a", "versions": {"torch": "2.13.0"}, "kernels": {"cpu": "X"}}
    assert explained(a, b) == "nothing that the runs recorded explains it"


def test_deepspeed_explains_every_difference():
    text = explained({"wrapper": "DeepSpeedEngine", "threads": 1}, {"world_size": 1, "threads": 2})
    assert text.startswith("equal within rounding at best, because DeepSpeed")
