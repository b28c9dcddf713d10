"""`first_difference` names every change in a copy of a run, and nothing else."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.run_folders import edit_json, edit_step, write_json, write_run
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from app.common.errors import UserError
from app.report.bitwise import _bits, first_difference, first_differing_step, read_weights
from app.runs.reader import read_run


@pytest.fixture
def twins(review_csv, tmp_path) -> tuple[Path, Path]:
    a = write_run(tmp_path / "a", review_csv())
    shutil.copytree(a, tmp_path / "b")
    return a, tmp_path / "b"


def difference(twins: tuple[Path, Path]) -> str | None:
    a, b = map(read_run, twins)
    forward, backward = first_difference(a, b), first_difference(b, a)
    assert (forward is None) == (backward is None)
    return forward


def edit_weights(file: Path, change) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_a_copy_is_identical(twins):
    assert difference(twins) is None


@pytest.mark.parametrize(("key", "description"), [("loss", "the loss"), ("grad_norm", "the gradient norm")])
def test_the_first_step_that_differs_in_its_last_bit_is_named(twins, key, description):
    for step in (5, 9):
        before = read_run(twins[0]).steps[step - 1][key]
        edit_step(twins[1], step, **{key: math.nextafter(before, 9)})
    assert difference(twins).startswith(f"step 5: {description} is ")
    assert first_differing_step(*map(read_run, twins)) == 5


def test_the_loss_of_a_step_is_named_before_its_gradient_norm(twins):
    edit_step(twins[1], 3, loss=0.5, grad_norm=0.5)
    assert difference(twins).startswith("step 3: the loss is ")


def test_a_step_skipped_because_of_an_overflow_differs_from_one_that_was_not(twins):
    for folder in twins:
        edit_step(folder, 3, grad_norm=None)
    assert difference(twins) is None
    edit_step(twins[1], 2, grad_norm=None)
    assert difference(twins).startswith("step 2: the gradient norm is ")
    assert difference(twins[::-1]).startswith("step 2: the gradient norm is None ")


def test_minus_zero_differs_from_zero(twins):
    edit_step(twins[0], 2, loss=0.0)
    edit_step(twins[1], 2, loss=-0.0)
    assert difference(twins) == f"step 2: the loss is 0.0 in {twins[0]} and -0.0 in {twins[1]}"


def test_missing_steps_are_named_after_differences_in_common_steps(twins):
    file = twins[1] / "steps.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-2]))
    assert difference(twins) == f"the number of steps is 12 in {twins[0]} and 10 in {twins[1]}"
    assert first_differing_step(*map(read_run, twins)) is None
    edit_step(twins[1], 4, loss=0.1)
    assert difference(twins).startswith("step 4: ")


def edit_prediction(run: Path, line: int, column: int, change) -> str:
    file = run / "predictions.csv"
    lines = file.read_text("utf-8").splitlines(keepends=True)
    cells = lines[line].split(",")
    cells[column] = change(cells[column])
    lines[line] = ",".join(cells)
    file.write_text("".join(lines), "utf-8")
    return cells[0]


def test_the_row_of_a_probability_that_differs_in_its_last_bit_is_named(twins):
    edit_prediction(twins[1], 7, 3, lambda cell: repr(math.nextafter(float(cell), 0)))
    row = edit_prediction(twins[1], 4, 4, lambda cell: repr(math.nextafter(float(cell), 2)))
    assert difference(twins).startswith(f"prediction for row {row}: the probability of '1' is ")


def test_another_predicted_class_is_named(twins):
    flip = {"0": "1", "1": "0"}.__getitem__
    row = edit_prediction(twins[1], 4, 2, flip)
    for column in (3, 4):
        edit_prediction(twins[1], 4, column, lambda cell: repr(1 - float(cell)))
    pairs = [cells.split(",")[1:3] for cells in (twins[1] / "predictions.csv").read_text("utf-8").splitlines()[1:]]
    metrics = json.loads((twins[1] / "metrics.json").read_text())
    write_json(twins[1] / "metrics.json", metrics | {"accuracy": sum(x == y for x, y in pairs) / len(pairs)})
    assert difference(twins).startswith(f"prediction for row {row}: the class is ")


def test_changed_labels_are_named_even_if_the_accuracy_is_the_same(twins):
    flip = {"0": "1", "1": "0"}.__getitem__
    for run in twins:
        row = edit_prediction(run, 1, 1, flip)
        metrics = json.loads((run / "metrics.json").read_text())
        write_json(run / "metrics.json", metrics | {"accuracy": metrics["accuracy"] - 1 / metrics["n_test"]})
    assert difference(twins) is None
    for line in (1, 2):
        edit_prediction(twins[1], line, 1, flip)
    assert difference(twins).startswith(f"prediction for row {row}: the label is ")


def test_a_step_without_a_gradient_norm_can_be_compared(twins):
    """It may be null or missing."""
    edit_step(twins[0], 6, grad_norm=None)
    lines = [json.loads(line) for line in (twins[1] / "steps.jsonl").read_text().splitlines()]
    del lines[5]["grad_norm"]
    (twins[1] / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert difference(twins) is None
    edit_step(twins[0], 6, grad_norm=0.5)
    assert difference(twins).startswith("step 6: the gradient norm is 0.5 in ")


@pytest.mark.parametrize("metric", ["f1", "loss"])
def test_a_metric_that_differs_is_named(twins, metric):
    edit_json(twins[1] / "metrics.json", **{metric: 0.25})
    assert difference(twins).startswith(f"the test {metric} is ")


def test_the_tensor_of_a_weight_that_differs_in_one_bit_is_named(twins):
    def change(tensors):
        tensors["layer.weight"].view(np.uint32)[1, 2] ^= 1

    edit_weights(twins[1] / "model" / "model.safetensors", change)
    assert "tensor 'layer.weight' differs" in difference(twins)


def test_the_sign_of_a_zero_weight_is_a_difference(twins):
    edit_weights(twins[1] / "model" / "model.safetensors", lambda tensors: tensors["layer.bias"].__setitem__(0, -0.0))
    assert "tensor 'layer.bias' differs" in difference(twins)


@pytest.mark.parametrize(
    ("change", "description"),
    [
        (lambda t: t.pop("layer.bias"), "tensor 'layer.bias' is only in"),
        (lambda t: t.update(extra=np.ones(1, np.float32)), "tensor 'extra' is only in"),
        (lambda t: t.update({"layer.bias": np.zeros(3, np.float16)}), "tensor 'layer.bias' differs"),
        (lambda t: t.update({"layer.bias": np.zeros((3, 1), np.float32)}), "tensor 'layer.bias' differs"),
    ],
)
def test_tensors_with_other_names_types_or_shapes_are_named(twins, change, description):
    edit_weights(twins[1] / "model" / "model.safetensors", change)
    assert description in difference(twins)


def test_sharded_weights_are_compared_like_a_single_file(twins):
    folder = twins[1] / "model"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for number, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, folder / f"model-{number}.safetensors")
    index = {"weight_map": {name: f"model-{number}.safetensors" for number, name in enumerate(tensors)}}
    write_json(folder / "model.safetensors.index.json", index)
    assert difference(twins) is None
    edit_weights(folder / "model-1.safetensors", lambda t: next(iter(t.values())).__iadd__(1))
    assert difference(twins).startswith("weights: ")
    (folder / "model-1.safetensors").unlink()
    assert "is only in" in difference(twins)


def test_weights_without_a_numpy_dtype_can_be_read(tmp_path):
    import torch
    from safetensors.torch import save_file as save_tensors

    save_tensors({"w": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    (weight,) = read_weights(tmp_path).values()
    assert weight.tolist() == [1.0, 1.0]
    assert weight.dtype == torch.bfloat16


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b[:-1], lambda b: b"", lambda b: b"\xff" * 9])
def test_damaged_weights_are_one_line_that_names_the_file_even_if_the_steps_differ(twins, damage):
    file = twins[1] / "model" / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    edit_step(twins[1], 1, loss=0.5)
    with pytest.raises(UserError) as problem:
        difference(twins)
    assert str(file) in str(problem.value)
    assert "\n" not in str(problem.value)


def test_missing_weights_are_named(twins):
    (twins[1] / "model" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors: missing"):
        difference(twins)


@given(st.floats(), st.floats())
def test_bitwise_equality_agrees_with_repr(x, y):
    """repr distinguishes all floats, -0.0 from 0.0 too, except for the payload of NaN."""
    if not (math.isnan(x) and math.isnan(y)):
        assert (_bits(x) == _bits(y)) == (repr(x) == repr(y))
    assert _bits(x) == _bits(x)
