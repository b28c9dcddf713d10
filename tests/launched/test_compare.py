"""`python -m app.compare` as a user starts it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from helpers.architectures import write_model
from helpers.jobs import SAMPLE_CSV, Job, TrainingRun, require_success

from app.compare import main
from app.program import run_program

pytestmark = pytest.mark.launched
SMALL = ["--csv", SAMPLE_CSV, "--model", "bert", "--max_length", 32, "--max_steps", 3, "--eval_strategy", "no"]


@pytest.mark.slow
def test_it_trains_both_paths_and_finds_no_difference(launch, compare, hotel_csv, tmp_path):
    flags = ["--csv", hotel_csv, "--max_length", 64, "--gradient_accumulation_steps", 2, "--validation_size", 0.1]
    flags += ["--max_steps", 7, "--eval_strategy", "steps", "--eval_steps", 5]
    done = launch("app.compare", "--nproc_per_node", 2, "--use_cpu", *flags)
    assert done.status == 0, done.err
    (folder,) = {path.resolve() for path in (tmp_path / "runs" / "comparisons").iterdir()}
    comparison = json.loads((folder / "comparison.json").read_text())
    assert [run["path"] for run in comparison["runs"]] == ["ddp_loop", "trainer_run"]
    assert [run["world_size"] for run in comparison["runs"]] == [2, 2]
    assert comparison["first_differing_step"] is None
    assert comparison["max_loss_difference"] == 0
    assert comparison["same_predictions"]
    assert comparison["disagreements"] == []
    assert "itwise identical" in done.out
    assert (folder / "comparison.md").read_text().partition("## Misclassified by both")[0] in done.out
    a, b = (folder / path for path in ("ddp_loop", "trainer_run"))
    for file in ("predictions.csv", "model/model.safetensors", "split.json", "evaluations.jsonl"):
        assert (a / file).read_bytes() == (b / file).read_bytes(), file
    evaluations = [json.loads(line) for line in (a / "evaluations.jsonl").read_text().splitlines()]
    assert [(line["step"], line["rows"]) for line in evaluations] == [(step, "validation") for step in (5, 7)]

    status, lines = compare(a, b, "--output_dir", "again", "--no_baselines")
    assert (status, lines) == (0, [])
    assert json.loads((tmp_path / "again" / "comparison.json").read_text())["first_differing_step"] is None


RATES = {"a": "1e-3", "b": "5e-2"}
SHARED_RUNS = {
    "one_rank": {name: TrainingRun("ddp_loop", [*SMALL, "--learning_rate", rate]) for name, rate in RATES.items()}
    # Plain Python has another default of --logical_ranks.
    | {"one": TrainingRun("trainer_run", [*SMALL, "--threads", 2])}
    | {"remedied": TrainingRun("trainer_run", [*SMALL, "--logical_ranks", 2, "--threads", 1])},
    "two_ranks": {"two": TrainingRun("ddp_loop", SMALL)},
}


def write_inputs(folder: Path, csv: Path) -> None:
    write_model(folder / "bert", "bert")  # the reviews are the bundled sample


@pytest.fixture(scope="module")
def two_runs(trained_by, shared_folder) -> Path:
    """The folder of two short runs `a` and `b` of ddp_loop with different learning rates."""
    require_success(trained_by("one_rank"))
    return shared_folder


def test_different_runs_are_compared_from_their_folders(compare, two_runs, tmp_path):
    assert compare(two_runs / "a", two_runs / "b", "--output_dir", "out") == (0, [])
    comparison = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert comparison["first_differing_step"] == 3, "the rate of step 1 is 0, so step 2 is the first to change weights"
    assert comparison["max_loss_difference"] > 0


def test_the_remedy_that_compare_names_makes_different_runs_identical(compare, trained_by, two_runs, tmp_path):
    """The default number of ranks under torchrun and with plain Python, and another number of threads."""
    require_success(trained_by("two_ranks"))
    two, one, remedied = (two_runs / name for name in ("two", "one", "remedied"))
    status, (line,) = compare(two, one, "--assert_equal")
    assert status == 1
    assert re.match(r"not equal: step \d+: the loss is ", line)  # rounding: it may be equal in the first steps
    assert line.endswith(
        "; trained differently: ranks 2 and 1, logical ranks 2 and 1, threads 1 and 2; "
        "start both with --logical_ranks 2 --threads 1"
    )
    assert compare(two, remedied, "--assert_equal") == (0, [])
    assert not (tmp_path / "runs").exists(), "only a report needs a folder"
    assert compare(two, one, "--assert_equal", "--no_baselines", "--output_dir", "report")[0] == 1
    assert line.partition("; ")[2] in (tmp_path / "report" / "comparison.md").read_text().replace("**T", "t")
    hashes = [json.loads((run / "metrics.json").read_text())["hash"] for run in (two, remedied, one)]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--logical_ranks", 2]], ids=["no flags", "as in README"])
def test_two_processes_and_one_as_people_type_them(launch, compare, tmp_path, flags):
    """README's three lines, with and without the flag that it adds."""
    brief = ["--csv", SAMPLE_CSV, "--max_length", 32, "--max_steps", 4, "--eval_strategy", "no", "--use_cpu"]
    for path, ranks in (("ddp_loop", 2), ("trainer_run", 1)):
        done = launch(path, *brief, *flags, ranks=ranks)
        assert done.status == 0, done.err
    runs = [tmp_path / "runs" / path / "latest" for path in ("ddp_loop", "trainer_run")]
    status, lines = compare(*runs, "--assert_equal", "--no_baselines", "--output_dir", "report")
    page, report = ((tmp_path / "report" / f"comparison.{kind}").read_text() for kind in ("html", "md"))
    if flags:
        assert (status, lines) == (0, [])
        assert "itwise identical" in page
        assert "itwise identical" in report
        return
    (line,) = lines
    threads = [json.loads((run / "settings.json").read_text())["threads"] for run in runs]  # by the number of cores
    cause = "ranks 2 and 1, logical ranks 2 and 1"
    remedy = "--logical_ranks 2"
    if threads[0] != threads[1]:
        cause, remedy = f"{cause}, threads {threads[0]} and {threads[1]}", f"{remedy} --threads {threads[0]}"
    explanation = f"rained differently: {cause}; start both with {remedy}"
    assert status == 1
    assert line.endswith(f"; t{explanation}")
    assert f"**T{explanation}.**" in report
    assert f"T{explanation}." in " ".join(re.sub("<[^>]*>", "", page).split())


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """Run app.compare in this process; return its exit status and the lines on standard error."""

    def run(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["compare", *map(str, arguments)])
        return run_program(main), capsys.readouterr().err.splitlines()

    return run


def damaged(two_runs: Path, tmp_path: Path, file: str, change) -> Path:
    copy = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
    shutil.copytree(two_runs / "a", copy)
    change(copy / file)
    return copy


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("file", "change"),
    [
        *(
            (name, Path.unlink)
            for name in ("settings.json", "split.json", "metrics.json", "predictions.csv", "steps.jsonl")
        ),
        ("model/model.safetensors", cut),
        *((name, cut) for name in ("settings.json", "split.json", "metrics.json", "predictions.csv", "steps.jsonl")),
    ],
)
def test_a_damaged_run_is_one_line_that_names_the_file(compare, two_runs, tmp_path, file, change):
    copy = damaged(two_runs, tmp_path, file, change)
    status, lines = compare(copy, two_runs / "b")
    assert (status, len(lines)) == (2, 1)
    assert str(copy / file) in lines[0]
    assert not (tmp_path / "runs").exists()


def test_different_splits_and_wrong_arguments_are_one_line(compare, two_runs, tmp_path):
    other = damaged(
        two_runs, tmp_path, "split.json", lambda p: p.write_text(p.read_text().replace('gerprint": "', 'gerprint": "f'))
    )
    for runs in (
        [other, two_runs / "b"],
        [two_runs / "a"],
        [two_runs / "none", two_runs / "b"],
        ["--dry_run"],
        ["--nproc_per_node", 0],
        ["--nproc-per-node", 0],
        [two_runs / "a", two_runs / "b", "--learning_rate", 1e-4],
        [two_runs / "a", two_runs / "b", "--seeds", 2],
    ):
        status, lines = compare(*runs)
        assert (status, len(lines)) == (2, 1), runs
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_an_interrupt_ends_everything_that_was_started(tmp_path):
    flags = ["--nproc_per_node", 2, "--use_cpu", "--csv", SAMPLE_CSV, "--num_train_epochs", 50]
    with Job("compare", *flags, cwd=tmp_path, ranks=0) as job:
        job.wait_for(lambda: list(tmp_path.rglob("steps.jsonl")))  # it trains
        assert len(job.processes()) >= 4, "compare, torchrun, two ranks"
        job.torchrun.send_signal(signal.SIGINT)
        done = job.finish(90)
    assert done.status == 130
    assert "interrupted" in done.err
