"""`first_difference` names every change of one of two identical runs, and nothing else."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.common.errors import UserError
from app.report.bitwise import check_same_rows, first_difference, first_differing_step
from app.runs.reader import Run


@pytest.fixture
def twins(make_pair) -> tuple[Run, Run]:
    return make_pair(same=True)


def difference(a: Run, b: Run) -> str | None:
    forward, backward = first_difference(a, b), first_difference(b, a)
    assert (forward is None) == (backward is None)
    return forward


def weights_of(run: Run) -> tuple[Path, dict[str, torch.Tensor]]:
    """The file of the weights, and a copy of them."""
    file = run.folder / "model" / "model.safetensors"
    return file, {name: tensor.clone() for name, tensor in load_file(file).items()}


def increase(values, *keys) -> None:
    """Change values by the last bit."""
    for key in keys:
        values[key] = math.nextafter(values[key], 9)


def to_weights(change):
    def rewrite(run: Run) -> None:
        file, tensors = weights_of(run)
        change(tensors)
        save_file(tensors, file)

    return rewrite


# What is named, and the change of the second run. {row} is that of the fourth prediction.
CHANGES = [
    ("step 5: the loss is ", lambda run: increase(run.steps[4], "loss", "grad_norm")),
    ("step 2: the gradient norm is ", lambda run: run.steps[1].update(grad_norm=None)),  # an overflow in fp16
    ("step 7: the loss is 0.0 ", lambda run: run.steps[6].update(loss=-0.0)),
    ("the number of steps is 12 in ", lambda run: run.steps.pop()),
    ("prediction for row {row}: the label is ", lambda run: run.predictions.__setitem__("label", "0")),
    ("prediction for row {row}: the class is ", lambda run: run.predictions.__setitem__("predicted", "0")),
    (
        "prediction for row {row}: the probability of '1' is ",
        lambda run: increase(run.predictions["probability_1"].array, 3, 6),
    ),
    ("the F1 score is 'F1 (class 1)' in ", lambda run: run.metrics.update(positive_class=0)),
    ("the test accuracy is ", lambda run: increase(run.metrics, "accuracy")),
    ("the test f1 is ", lambda run: increase(run.metrics, "f1", "loss")),
    ("the test loss is ", lambda run: increase(run.metrics, "loss")),
    ("weights: tensor 'layer.weight' differs", to_weights(lambda t: t["layer.weight"].view(torch.int32)[1].add_(1))),
    ("weights: tensor 'layer.bias' differs", to_weights(lambda t: t["layer.bias"][0].neg_())),  # a zero
    ("weights: tensor 'layer.bias' differs", to_weights(lambda t: t.update({"layer.bias": torch.zeros(3).half()}))),
    ("weights: tensor 'layer.bias' differs", to_weights(lambda t: t.update({"layer.bias": torch.zeros(3, 1)}))),
    ("weights: tensor 'layer.bias' is only in", to_weights(lambda t: t.pop("layer.bias"))),
]


def test_runs_with_the_same_values_are_identical(twins):
    assert difference(*twins) is None
    assert first_differing_step(*twins) is None
    twins[0].steps[5].update(loss=math.nan, grad_norm=None)
    twins[1].steps[5].update(loss=math.nan)
    del twins[1].steps[5]["grad_norm"]
    assert difference(*twins) is None, "a gradient norm may be null or missing"


@pytest.mark.parametrize(("named", "change"), CHANGES)
def test_the_first_change_is_named(twins, named, change):
    for run in twins:  # the first change of all labels, or of all classes, is in the fourth row
        run.predictions[["label", "predicted"]] = "0"
        run.predictions.loc[3, ["label", "predicted"]] = "1"
        run.steps[6]["loss"] = 0.0
    change(twins[1])
    assert difference(*twins).startswith(named.format(row=twins[0].predictions["row"][3]))
    step = int(named[5]) if named.startswith("step ") else None
    assert first_differing_step(*twins) == step


def test_runs_of_other_rows_are_not_compared(twins):
    twins[1].split["fingerprint"] = "0" * 64
    with pytest.raises(UserError, match="have different splits"):
        check_same_rows(*twins)


def test_sharded_weights_are_compared_like_a_single_file(twins):
    file, tensors = weights_of(twins[1])
    file.unlink()
    for number, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, file.with_name(f"model-{number}.safetensors"))
    assert difference(*twins) is None


@pytest.mark.parametrize("left", [0.5, 0.99, 0, None])
def test_damaged_weights_are_one_line_that_names_the_file_even_if_the_steps_differ(twins, left):
    file, _ = weights_of(twins[1])
    content = file.read_bytes()
    file.unlink() if left is None else file.write_bytes(content[: int(left * len(content))])
    increase(twins[1].steps[0], "loss")
    with pytest.raises(UserError) as problem:
        difference(*twins)
    assert str(file) in str(problem.value)
    assert "\n" not in str(problem.value)
