"""When gradients are ready, and steps with batches of several sizes."""

from __future__ import annotations

import pytest

from app.bench import rounds
from app.bench.communication import batch_size, readiness
from app.bench.communication.readiness import Readiness
from app.common.errors import UserError
from app.setting_groups import TINY_BERT
from app.settings import Settings
from app.training.build import build_data


@pytest.fixture
def settings(review_csv, tmp_path, monkeypatch) -> Settings:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rounds, "ROUNDS", 1)
    monkeypatch.setattr(rounds, "FEWEST_ROUNDS", 1)
    return Settings(model="tiny-bert", csv=str(review_csv(90)), max_length=16, train_batch_size=8, disable_tqdm=True)


def test_every_gradient_is_ready_once_and_its_bytes_are_exchanged(settings, world, monkeypatch):
    monkeypatch.setattr(readiness, "models", lambda name: [TINY_BERT])
    monkeypatch.setattr(readiness, "PASSES", 3)
    data = build_data(settings, world)
    section = readiness.measure_readiness(settings, data, seconds=0.001, world=world)
    found = section.data[TINY_BERT]
    model = readiness.build_named(TINY_BERT, settings, data, world=world)
    assert sum(found["bytes"]) == 4 * sum(parameter.numel() for parameter in model.parameters())
    assert len(found["seconds"]) == len(list(model.parameters()))
    assert found["seconds"] == sorted(found["seconds"])
    assert found["seconds"][0] > 0
    embeddings = max(parameter.numel() for parameter in model.parameters())
    assert 4 * embeddings in found["bytes"][-5:], "those of the embeddings are ready last"
    assert sum(size for _, size in found["exchange"]) == sum(found["bytes"])
    figure, table = section.parts
    assert "gradients that are ready" in figure.svg
    assert [row[0] for row in table.rows] == [TINY_BERT]


def test_half_of_the_bytes():
    assert Readiness([1.0, 2.0, 3.0], [4, 4, 8], []).half == 2.0
    assert Readiness([1.0, 2.0, 3.0], [4, 8, 8], []).half == 2.0
    assert Readiness([1.0, 2.0, 3.0], [4, 4, 12], []).half == 3.0


@pytest.mark.slow
def test_the_plan_has_a_limit_for_the_sizes_that_are_timed(settings, world, monkeypatch):
    monkeypatch.setattr(batch_size, "ROWS", (4, 8, 1000))
    monkeypatch.setattr(batch_size, "memory_per_rank", lambda world: 64 << 20)
    section = batch_size.measure_batch_size(settings, build_data(settings, world), seconds=0.001, world=world)
    points, limit = section.data["points"], section.data["limit"]
    assert list(points) == ["4", "8"], "a thousand rows are neither there, nor do they fit"
    assert 0 < points["4"]["planned_bytes"] < points["8"]["planned_bytes"]
    assert 4 * 3 <= points["4"]["tokens"] <= 4 * 16
    assert 8 * 3 <= points["8"]["tokens"] <= 8 * 16
    assert limit > 8
    plan = batch_size.build_plan(settings, world.topology)
    base = plan.largest_memory("ddp").on_device(cpu_offload=False)
    needed = [base + plan.count(rows, "ddp").peak for rows in (limit, limit + 1)]
    assert needed[0] <= 64 << 20 < needed[1]
    assert f"{limit:,} rows" in section.parts[-1].note


def test_batches_that_do_not_fit_are_not_timed(settings, world, monkeypatch):
    monkeypatch.setattr(batch_size, "largest_that_fits", lambda free, count: 6)
    section = batch_size.measure_batch_size(settings, build_data(settings, world), seconds=0.001, world=world)
    assert list(section.data["points"]) == ["4"]
    monkeypatch.setattr(batch_size, "largest_that_fits", lambda free, count: 0)
    with pytest.raises(UserError, match="no batch fits into"):
        batch_size.measure_batch_size(settings, build_data(settings, world), seconds=0.001, world=world)
