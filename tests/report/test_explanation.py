"""Why two runs differ: exactly the recorded differences that may explain it, and a remedy that removes them."""

from __future__ import annotations

import json

import pytest
from helpers.html_page import Page
from helpers.run_folders import edit_json, write_run

from app.report.comparison import compare_runs, compare_seeds
from app.report.explanation import conclude, explain
from app.report.render import as_html, as_markdown
from app.runs.reader import read_run

STEP = "step 1: the loss is 0.5 in a and 0.6 in b"
UNEXPLAINED = "nothing that the runs recorded explains it"


@pytest.fixture
def explained(review_csv, tmp_path):
    """A function that returns the explanation for two runs with these settings."""

    def of(a: dict, b: dict, difference: str = STEP) -> str:
        folders = [write_run(tmp_path / name, review_csv(), rng_seed=i) for i, name in enumerate("ab")]
        for folder, settings in zip(folders, (a, b), strict=True):
            edit_json(folder / "settings.json", **settings)
        return explain(*map(read_run, folders), difference)

    return of


def test_the_three_commands_of_the_readme_name_ranks_and_threads_and_the_flags_that_help(explained):
    two, one = {"world_size": 2, "logical_ranks": 2, "threads": 1}, {"world_size": 1, "logical_ranks": 1, "threads": 2}
    assert explained(two | {"devices": ["cpu", "cpu"]}, one | {"devices": ["cpu"]}) == (
        "trained differently: ranks 2 and 1, logical ranks 2 and 1, threads 1 and 2; "
        "start both with --logical_ranks 2 --threads 1"
    )


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        ({"threads": 4}, {"threads": 2}, "threads 4 and 2; start both with --threads 2"),
        ({"dropout": None}, {"dropout": 0.1}, "dropout not set and 0.1"),
        (
            {"learning_rate": 0.1, "precision": "bf16"},
            {"precision": "fp32"},
            "learning_rate 0.1 and 0.001, precision bf16 and fp32",
        ),
        ({"world_size": 3, "logical_ranks": 3}, {"logical_ranks": 2}, "ranks 3 and 2, logical ranks 3 and 2"),
        (
            {"world_size": 4},
            {"world_size": 1},
            "ranks 4 and 1, logical ranks 4 and 1; start both with --logical_ranks 4",
        ),
        (
            {"versions": {"torch": "2.13.0", "transformers": "5.0"}},
            {"versions": {"torch": "2.11.0", "transformers": "5.1"}},
            "torch 2.13.0 and 2.11.0, transformers 5.0 and 5.1",
        ),
        (
            {"devices": ["NVIDIA H100 NVL"], "deterministic": True},
            {"devices": ["NVIDIA A10"], "deterministic": True},
            "devices NVIDIA H100 NVL and NVIDIA A10",
        ),
        (
            {"kernels": {"cpu": "X", "instructions": "AVX512", "MKL_CBWR": None}},
            {"kernels": {"cpu": "X", "instructions": "AVX2", "MKL_CBWR": "COMPATIBLE"}},
            "kernels.instructions AVX512 and AVX2, kernels.MKL_CBWR not set and COMPATIBLE",
        ),
        (
            {"git_commit": "a" * 40},
            {"git_commit": "b" * 40},
            f"commit of this program {'a' * 40} and {'b' * 40}",
        ),
        ({"model_commit": "a" * 8}, {"model_commit": "b" * 8}, "commit of the model aaaaaaaa and bbbbbbbb"),
        (
            {"git_commit": "a" * 40, "threads": 4},
            {"git_commit": "b" * 40, "threads": 2},
            f"threads 4 and 2, commit of this program {'a' * 40} and {'b' * 40}; start both with --threads 2",
        ),
        (
            {"model_config": {"hidden_act": "gelu", "layers": 2, "_name_or_path": "x"}, "tokens_sha256": "a"},
            {"model_config": {"hidden_act": "relu", "layers": 2, "_name_or_path": "y"}, "tokens_sha256": "a"},
            "model_config.hidden_act gelu and relu",
        ),
        (
            {"max_length": 8, "tokens_sha256": "a" * 64, "threads": 4},
            {"max_length": 9, "tokens_sha256": "b" * 64, "threads": 2},
            f"threads 4 and 2, max_length 8 and 9, tokens {'a' * 39}… and {'b' * 39}…; start both with --threads 2",
        ),
        ({"a_new_setting": 1}, {"a_new_setting": 2}, "a_new_setting 1 and 2"),
    ],
)
def test_a_recorded_difference_is_named_with_its_remedy(explained, a, b, text):
    assert explained(a, b) == f"trained differently: {text}"


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"launchers": ["host:1"]}, {"launchers": ["host:2"]}),
        ({"world_size": 1, "logical_ranks": 2, "strategy": "zero3"}, {"logical_ranks": 2, "path": "trainer_run"}),
        (
            {"save_steps": 5, "output_dir": "x", "logging_steps": 3},
            {"save_steps": 6, "output_dir": "y", "logging_steps": 4},
        ),
        ({"eval_steps": 5, "eval_batch_size": 8}, {"eval_steps": 6, "eval_batch_size": 9}),
        ({"threads": None, "git_commit": None}, {"threads": 2, "git_commit": "b" * 40}),
        ({}, {"model_config": {"hidden_act": "relu"}, "model_code_sha256": "a", "tokens_sha256": "a"}),
        ({"model_commit": None}, {"model_commit": "a" * 40}),
        ({}, {"versions": {"python": "3.11", "torch": "2.13.0"}, "kernels": {"cpu": "X"}}),
    ],
)
def test_differences_without_effect_or_with_unknown_values_are_not_named(explained, a, b):
    assert explained(a, b).startswith(UNEXPLAINED)


def test_settings_of_the_evaluation_explain_other_predictions_but_not_other_steps(explained):
    sizes = [{"eval_batch_size": size} for size in (8, 64)]
    assert "eval_batch_size 8 and 64" in explained(*sizes, "prediction for row 3: the class is 1 in a and 0 in b")


def test_the_best_weights_depend_on_when_the_model_was_evaluated(explained):
    settings = [{"load_best_model_at_end": True, "eval_steps": steps} for steps in (5, 6)]
    assert "eval_steps 5 and 6" in explained(*settings, "weights: 1 of 3 values of tensor 'x' differ between a and b")


def test_gpus_without_deterministic_are_named_even_if_nothing_else_differs(explained):
    gpu = {"devices": ["NVIDIA H100 NVL"] * 2}
    text = explained(gpu, gpu)
    assert text.startswith("trained differently: GPUs were used without --deterministic")
    assert text.endswith("start both with --deterministic")


def test_gpus_without_deterministic_add_the_flag_to_the_remedy(explained):
    gpu = {"devices": ["NVIDIA H100 NVL"], "world_size": 1}
    assert explained(gpu | {"threads": 1}, gpu | {"threads": 2}).endswith("start both with --threads 1 --deterministic")


def conclusion_of(comparison: dict) -> str:
    return conclude(comparison["first_difference"], comparison["explanation"])


@pytest.fixture
def pair(review_csv, tmp_path):
    """Two runs that differ, one of which used other threads; and with `same`, two identical ones."""

    def make(same: bool = False, seed: int = 42):
        folders = [
            write_run(tmp_path / f"{name}{seed}", review_csv(), rng_seed=0 if same else i, seed=seed, launchers=[name])
            for i, name in enumerate("ab")
        ]
        if not same:
            edit_json(folders[0] / "settings.json", threads=1)
            edit_json(folders[1] / "settings.json", threads=2)
        return tuple(map(read_run, folders))

    return make


def test_reports_show_the_explanation_under_the_headline(pair):
    comparison = compare_runs(*pair(), baselines=False)
    text = "rained differently: threads 1 and 2; start both with --threads 1."
    assert f"**T{text}**" in as_markdown(comparison)
    assert f"T{text}" in Page(as_html(comparison)).text.partition("test reviews correct")[0]
    assert conclusion_of(comparison).startswith("not equal: step 1: the loss is ")
    assert json.loads(json.dumps(comparison)) == comparison


def test_reports_of_identical_runs_have_no_explanation_and_no_setting_that_differs(pair):
    comparison = compare_runs(*pair(same=True), baselines=False)
    assert comparison["explanation"] is None
    assert conclusion_of(comparison).startswith("bitwise identical")
    page = as_html(comparison)
    assert "None." in page.partition("Settings that differ")[2]
    assert "differently:" not in page + as_markdown(comparison)


def test_over_seeds_the_first_pair_that_differs_is_explained(pair):
    comparison = compare_seeds([pair(same=True, seed=1), pair(seed=2)], baselines=False)
    assert conclusion_of(comparison).startswith("not equal: step 1: ")
    assert conclusion_of(comparison).endswith("threads 1 and 2; start both with --threads 1")
    assert "Trained differently: threads 1 and 2" in as_markdown(comparison)


@pytest.mark.parametrize(
    ("hashes", "shown"),
    [
        (("d" * 64, "d" * 64), f"{'d' * 64} (both)"),
        (("d" * 64, None), f"{'d' * 64} and not recorded (an earlier version wrote the run)"),
        (("d" * 64, "e" * 64), f"{'d' * 64} and {'e' * 64}"),
    ],
)
def test_reports_show_the_hashes(pair, hashes, shown):
    comparison = compare_runs(*pair(), baselines=False)
    for run, hash_ in zip(comparison["runs"], hashes, strict=True):
        assert run["hash"] is None, "write_run writes none, as earlier versions did"
        run["hash"] = hash_
    assert f"hash of the results: {shown}\n" in as_markdown(comparison)
    assert f"hash of the results: {shown}" in Page(as_html(comparison)).text


def test_evaluations_that_differ_explain_the_hashes_of_identical_training(pair):
    a, b = pair(same=True)
    (b.folder / "evaluations.jsonl").unlink()
    for run, digit in ((a, "d"), (b, "e")):
        edit_json(run.folder / "metrics.json", hash=digit * 64)
    markdown = as_markdown(compare_runs(*(read_run(run.folder) for run in (a, b)), baselines=False))
    assert f"{'e' * 64}: only the evaluations during training differ" in markdown


def test_a_run_with_deepspeed_is_equal_within_rounding_at_best(explained):
    text = explained({"wrapper": "DeepSpeedEngine", "world_size": 2}, {"world_size": 1})
    assert text == "equal within rounding at best, because DeepSpeed adds gradients in an order of its own"
