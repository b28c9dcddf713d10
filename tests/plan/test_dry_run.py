"""`--dry_run` prints the plan of a run, and does nothing else."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from app import compare, ddp_loop, trainer_run
from app.checkpoint.resume import Resume
from app.common.errors import AgreedError
from app.experiments import same_bits
from app.plan import report
from app.plan.report import print_plan
from app.program import run_program
from app.settings import Settings
from app.training import prepare

TITLES = ("Memory of the rank that needs most", "Traffic: what a rank sends")


@pytest.fixture
def settings(review_csv, tmp_path, monkeypatch) -> Settings:
    monkeypatch.chdir(tmp_path)
    return Settings(
        csv=str(review_csv(90)), use_cpu=True, max_length=16, train_batch_size=8, strategy="zero3", dry_run=True
    )


@pytest.mark.parametrize("path", [ddp_loop, trainer_run])
def test_both_paths_print_the_plan_instead_of_training(path, settings, world, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(path, "join", lambda _: nullcontext(world))
    monkeypatch.setattr(path, "fine_tune", lambda *_: pytest.fail("this run trains"))
    monkeypatch.setattr(prepare, "build_model", lambda *_: pytest.fail("this run loads weights"))
    path.main(settings)
    text = capsys.readouterr().out
    assert "8 rows per step = 1 rank(s) x 8 rows x 1 micro-batch(es); 16 tokens per row, fp32" in text
    for title in TITLES:
        assert title in text
    assert text.count("| zero3 |") == 2
    assert "| ddp |" not in text, "only the strategy of the run"
    assert [path.name for path in tmp_path.iterdir()] == ["reviews.csv"], "no folder is created"


def test_a_mistake_is_reported_as_by_the_run(settings, world, tmp_path):
    settings.output_dir = str(tmp_path / "used")
    Path(settings.output_dir).mkdir()
    Path(settings.output_dir, "file").touch()
    with pytest.raises(AgreedError, match="--output_dir"):
        print_plan("ddp_loop", settings, world)
    settings.output_dir, settings.train_batch_size = None, 1_000
    with pytest.raises(AgreedError, match="81 training rows do not fill one batch"):
        print_plan("ddp_loop", settings, world)


def test_a_resumed_run_has_the_logical_ranks_of_the_run_before(settings, world, monkeypatch, capsys):
    def resolve(path_name, given, world):
        return Settings(**(given.as_dict() | {"logical_ranks": 4})), Resume()

    monkeypatch.setattr(report, "resolve_settings", resolve)
    print_plan("ddp_loop", settings, world)
    assert "4 logical ranks (on 1 rank(s)) x 2 rows" in capsys.readouterr().out


@pytest.mark.parametrize("program", [compare, same_bits])
def test_programs_that_train_several_runs_refuse_the_flag_of_one_run(program, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program", "--dry_run", "--use_cpu"])
    assert run_program(program.main) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(("error: --dry_run: use app.plan", "error: unknown argument --dry_run"))
    assert not list(tmp_path.iterdir())
