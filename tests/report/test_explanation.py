"""Why two runs differ: exactly the recorded differences that may explain it, and a remedy that removes them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from app.report.explanation import differing_settings, explain
from app.runs.reader import Run

STEP, PREDICTION, WEIGHTS = "step 1: the loss is 0.5", "prediction for row 3: the class is 1", "weights: tensor 'x'"
SETTINGS = {"path": "ddp_loop", "world_size": 2, "devices": ["cpu", "cpu"], "learning_rate": 1e-3}
SETTINGS |= {"versions": {"python": "3.11"}, "output_dir": "a", "seed": 42}
H100, A10 = ({"devices": [name], "world_size": 1} for name in ("NVIDIA H100 NVL", "NVIDIA A10"))
BEST = {"load_best_model_at_end": True}


def explained(a: dict, b: dict, difference: str = STEP) -> str:
    return explain(*(Run(Path("run"), SETTINGS | c, {}, [], [], {}, pd.DataFrame()) for c in (a, b)), difference)


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (
            {"logical_ranks": 2, "threads": 1},
            {"world_size": 1, "devices": ["cpu"], "logical_ranks": 1, "threads": 2},
            "ranks 2 and 1, logical ranks 2 and 1, threads 1 and 2; start both with --logical_ranks 2 --threads 1",
        ),
        # No number of logical ranks, which is a power of two, fits both.
        ({"world_size": 3}, {"world_size": 1}, "ranks 3 and 1, logical ranks 3 and 1"),
        ({"world_size": 4}, {"world_size": 3}, "ranks 4 and 3, logical ranks 4 and 3"),
        (
            {"dropout": None, "learning_rate": 0.1, "a_new_setting": 1},
            {"dropout": 0.1, "a_new_setting": 2},
            "learning_rate 0.1 and 0.001, dropout not set and 0.1, a_new_setting 1 and 2",
        ),
        (
            {"versions": {"torch": "2.13.0"}, "kernels": {"cpu": "X", "instructions": "AVX512", "MKL_CBWR": None}},
            {"versions": {"torch": "2.11.0"}, "kernels": {"cpu": "X", "instructions": "AVX2", "MKL_CBWR": "AVX2"}},
            "torch 2.13.0 and 2.11.0, kernels.instructions AVX512 and AVX2, kernels.MKL_CBWR not set and AVX2",
        ),
        (H100 | {"deterministic": True}, A10 | {"deterministic": True}, "devices NVIDIA H100 NVL and NVIDIA A10"),
        (
            H100 | {"threads": 1},
            H100 | {"threads": 2},
            "threads 1 and 2, GPUs were used without --deterministic, which may give different results each time; "
            "start both with --threads 1 --deterministic",
        ),
        (
            {"git_commit": "a" * 40, "model_commit": "c" * 8, "threads": 4},
            {"git_commit": "b" * 40, "model_commit": "d" * 8, "threads": 2},
            f"threads 4 and 2, commit of this program {'a' * 40} and {'b' * 40}, "
            "commit of the model cccccccc and dddddddd; start both with --threads 2",
        ),
        (
            {"model_config": {"hidden_act": "gelu", "layers": 2, "_name_or_path": "x"}, "tokens_sha256": "a" * 64},
            {"model_config": {"hidden_act": "relu", "layers": 2, "_name_or_path": "y"}, "tokens_sha256": "b" * 64},
            f"tokens {'a' * 39}… and {'b' * 39}…, model_config.hidden_act gelu and relu",
        ),
    ],
)
def test_a_recorded_difference_is_named_with_its_remedy(a, b, text):
    assert explained(a, b) == f"trained differently: {text}"


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"launchers": ["host:1"]}, {"launchers": ["host:2"]}),
        ({"world_size": 1, "logical_ranks": 2, "strategy": "zero3"}, {"logical_ranks": 2, "path": "trainer_run"}),
        ({"save_steps": 5, "output_dir": "x", "logging_steps": 3}, {"save_steps": 6, "logging_steps": 4}),
        ({"eval_steps": 5, "eval_batch_size": 8}, {"eval_steps": 6, "eval_batch_size": 9}),
        ({"threads": None, "git_commit": None}, {"threads": 2, "git_commit": "b" * 40}),
        ({}, {"model_config": {"hidden_act": "relu"}, "model_code_sha256": "a", "tokens_sha256": "a"}),
        ({"model_commit": None}, {"model_commit": "a" * 40}),
        ({}, {"versions": {"python": "3.11", "torch": "2.13.0"}, "kernels": {"cpu": "X"}}),
    ],
)
def test_differences_without_effect_or_with_unknown_values_are_not_named(a, b):
    assert explained(a, b) == "nothing that the runs recorded explains it"


@pytest.mark.parametrize(
    ("a", "b", "difference", "text"),
    [
        # Settings of the evaluation explain other predictions but not other steps.
        ({"eval_batch_size": 8}, {"eval_batch_size": 64}, PREDICTION, "eval_batch_size 8 and 64"),
        # The best weights depend on when the model was evaluated.
        (BEST | {"eval_steps": 5}, BEST | {"eval_steps": 6}, WEIGHTS, "eval_steps 5 and 6"),
        ({"wrapper": "DeepSpeedEngine"}, {"world_size": 1}, STEP, "equal within rounding at best, because DeepSpeed"),
    ],
)
def test_what_explains_a_difference_depends_on_where_it_is_and_on_deepspeed(a, b, difference, text):
    assert text in explained(a, b, difference)


def test_only_settings_that_describe_the_training_and_differ_are_listed():
    older = SETTINGS | {"model_config": {"act": "gelu", "layers": 2}, "bf16": False}
    newer = SETTINGS | {"model_config": {"act": "relu", "layers": 2}, "output_dir": "y", "new": 1, "seed": 7}
    assert differing_settings(older, newer) == {"seed": (42, 7), "model_config.act": ("gelu", "relu")}
