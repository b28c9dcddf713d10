"""`--dry_run` prints the plan of a run, and does nothing else."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from app import ddp_loop, trainer_run
from app.checkpoint.resume import Resume
from app.common.errors import AgreedError
from app.plan import report
from app.plan.report import print_plan
from app.settings import Settings
from app.training import prepare


@pytest.fixture
def settings(review_csv, tmp_path, monkeypatch) -> Settings:
    monkeypatch.chdir(tmp_path)
    return Settings(
        csv=str(review_csv(90)), use_cpu=True, max_length=16, train_batch_size=8, strategy="zero3", dry_run=True
    )


@pytest.mark.parametrize("path", [ddp_loop, trainer_run])
def test_both_paths_print_the_plan_instead_of_training(path, settings, world, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(path, "join", lambda _: nullcontext(world))
    monkeypatch.setattr(prepare, "build_model", lambda *_: pytest.fail("this run loads weights"))
    path.main(settings)
    text = capsys.readouterr().out
    assert "8 rows per step = 1 rank(s) x 8 rows x 1 micro-batch(es); 16 tokens per row, fp32" in text
    assert text.count("| zero3 |") == 2, "memory and traffic"
    assert "| ddp |" not in text, "only the strategy of the run"
    assert [path.name for path in tmp_path.iterdir()] == ["reviews.csv"], "no folder is created"


@pytest.mark.parametrize(
    ("changes", "line"),
    [({"output_dir": "."}, "--output_dir"), ({"train_batch_size": 1_000}, "81 training rows do not fill one batch")],
)
def test_a_mistake_is_reported_as_by_the_run(settings, world, changes, line):
    with pytest.raises(AgreedError, match=line):
        print_plan("ddp_loop", Settings(**settings.as_dict() | changes), world)


def test_a_resumed_run_has_the_logical_ranks_of_the_run_before(settings, world, monkeypatch, capsys):
    def resolve(path_name, given, world):
        return Settings(**(given.as_dict() | {"logical_ranks": 4})), Resume()

    monkeypatch.setattr(report, "resolve_settings", resolve)
    print_plan("ddp_loop", settings, world)
    assert "4 logical ranks (on 1 rank(s)) x 2 rows" in capsys.readouterr().out
