"""Trainings with skipped synchronization: the same rows, in fewer updates."""

from __future__ import annotations

import pytest

from app.bench.communication.convergence import as_section, loss_curve, measure_convergence, variants_of
from app.bench.communication.trainings import Training
from app.settings import Settings
from app.training.build import build_data

NAMES = ["every one", "every 2", "every 2, lr × 2", "every 4", "every 4, lr × 4", "every 8", "every 8, lr × 8"]


def test_all_variants_see_the_same_rows():
    variants = variants_of(Settings(strategy="zero2", learning_rate=1e-4), 1000, 2, pretrained=True)
    assert list(variants) == NAMES
    assert {v.train_batch_size * v.max_steps for v in variants.values()} == {160 * Settings.train_batch_size}
    assert {v.train_batch_size // v.gradient_accumulation_steps for v in variants.values()} == {32}
    assert [round(v.learning_rate / 1e-4) for v in variants.values()] == [1, 1, 2, 1, 4, 1, 8]
    assert {v.strategy for v in variants.values()} == {"ddp"}


def test_the_number_of_steps_is_a_multiple_of_the_longest_interval():
    variants = variants_of(Settings(max_steps=20), 1000, 1, pretrained=True)
    assert [v.max_steps for v in variants.values()] == [16, 8, 8, 4, 4, 2, 2]


def test_a_batch_with_too_few_rows_is_left_out():
    assert list(variants_of(Settings(), 100, 1, pretrained=True)) == NAMES[:3]


def test_a_curve_averages_over_steps_and_seeds():
    assert loss_curve([[4.0, 2.0], [2.0, 0.0]], rows=8) == [(8, 3.0), (16, 1.0)]
    curve = loss_curve([[float(i) for i in range(40)]], rows=2)
    assert curve[:2] == [(4, 0.5), (8, 2.5)]
    assert curve[-1] == (80, 38.5)


def test_the_section_shows_paired_differences():
    variants = variants_of(Settings(), 64, 1, pretrained=True)
    trainings = {
        name: [Training(accuracy + shift, [1.0, 0.5]) for accuracy in (0.7, 0.8)]
        for name, shift in zip(variants, (0.0, -0.1, 0.0), strict=True)
    }
    table, losses, accuracy = as_section(variants, trainings, draw=True).parts
    assert [row[3] for row in table.rows] == ["75.00%", "65.00%", "75.00%"]
    assert [row[4] for row in table.rows] == ["", "-10.00", "+0.00"]
    assert all(name in losses.svg for name in variants)
    assert "every 2" in accuracy.svg


def test_one_exchange_per_micro_batch_is_ordinary_training(review_csv, tmp_path, monkeypatch, world):
    monkeypatch.chdir(tmp_path)
    lengths = {"max_length": 16, "train_batch_size": 20, "max_steps": 8}
    settings = Settings(model="tiny-bert", csv=str(review_csv(60)), disable_tqdm=True, **lengths)
    section = measure_convergence(settings, build_data(settings, world), 2, pretrained=False, world=world)
    assert list(section.data) == NAMES[:3]
    assert [len(section.data[name]["losses"][0]) for name in section.data] == [8, 4, 4]
    assert all(len(section.data[name]["accuracies"]) == 2 for name in section.data)
    first = section.data["every one"]["losses"][0][:2]
    assert section.data["every 2"]["losses"][0][0] == pytest.approx(sum(first) / 2, rel=0.05), "the same rows"
