"""The fixed tree for loops of one's own: gradients, buffers and random numbers, and what a mistake is answered with.

tests/launched/test_your_own_loop.py runs the examples.
"""

from __future__ import annotations

import copy
import json
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import GradientState
from strategies.ranks import on_ranks
from strategies.test_accumulation import add_neighbors
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

from app.fixed_tree import FixedTree, FixedTreeSampler
from app.fixed_tree_trainer import FixedTreeTrainerMixin
from app.tracing import hash_and_norm

V = 4


class Model(nn.Module):
    """BatchNorm, and a constant whose sum would overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))
        self.register_buffer("mask", torch.full((3,), torch.finfo(torch.float32).min))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def step_of(tree: FixedTree, inputs: torch.Tensor, step: int = 0) -> list[torch.Tensor]:
    for logical_rank in tree.logical_ranks:
        with tree.micro_batch(step, logical_rank):
            (tree.wrapped(inputs[logical_rank]) + tree.wrapped(inputs[logical_rank].flip(1))).backward()
    return [p.grad.clone() for p in tree.parameters]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradients_and_statistics_are_the_means_over_the_logical_ranks(ranks, tmp_path):
    """Of plain PyTorch, and so are those of a trace. The tree clears the gradients itself."""
    torch.manual_seed(0)
    model, inputs = Model(), torch.randn(V, 8, 6)
    leaves, means = [], []
    for x in inputs:
        alone = copy.deepcopy(model)
        (alone(x) + alone(x.flip(1))).backward()  # DDP would begin the second forward pass with rank 0's statistics
        leaves.append([p.grad for p in alone.parameters()])
        means.append(alone.layers[1].running_mean)
    expected = [add_neighbors(of_parameter) / V for of_parameter in zip(*leaves, strict=True)]
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def work(world: Any) -> tuple[Any, ...]:
        options = {"find_unused_parameters": ranks == 2, "gradient_as_bucket_view": ranks == 4}
        tree = FixedTree(DistributedDataParallel(copies[world.rank], **options), V, threads=1)
        tree.trace_tensors(tmp_path / "tensors.jsonl", 1, 1)
        optimizers = [torch.optim.SGD([p], lr=0.0, momentum=0.9) for p in tree.parameters]
        for step in range(2):
            found = step_of(tree, inputs, step)
            if step == 0:
                buffers = {name: buffer.clone() for name, buffer in copies[world.rank].named_buffers()}
                for optimizer in optimizers:
                    optimizer.step()
        return found, buffers, tree.clip_grad_norm_(1e9)

    for found, buffers, norm in on_ranks(work, ranks):
        assert all(map(torch.equal, found, expected))
        assert norm == torch.cat([g.flatten() for g in expected]).double().norm().float()
        assert torch.equal(buffers["layers.1.running_mean"], add_neighbors([mean / V for mean in means]))
        assert torch.equal(buffers["mask"], model.mask)
        assert buffers["layers.1.num_batches_tracked"] == 2
    trace = [json.loads(line) for line in (tmp_path / "tensors.jsonl").read_text().splitlines()]
    hashes = {(line["phase"], line["logical_rank"], line["name"]): line["hash"] for line in trace}
    for i, (name, parameter) in enumerate(model.named_parameters()):
        assert [hashes["gradient", n, name] for n in range(V)] == [
            hash_and_norm(leaves[n][i])["hash"] for n in range(V)
        ]
        assert hashes["summed gradient", None, name] == hash_and_norm(expected[i])["hash"]
        assert hashes["parameter", None, name] == hash_and_norm(parameter)["hash"]
        assert hashes["moment", None, f"{name}.momentum_buffer"] == hash_and_norm(expected[i])["hash"]
    assert hashes["buffer", None, "layers.1.running_mean"] == hash_and_norm(buffers["layers.1.running_mean"])["hash"]
    assert len(trace) == len(hashes) == V * (6 + 6) + 6 + 4 + 6 + 6
    plain = FixedTree(model, V, threads=1)  # one process without DistributedDataParallel
    assert all(map(torch.equal, step_of(plain, inputs), expected))


def test_statistics_that_have_changed_outside_of_the_tree_are_reported():
    copies, inputs = [Model(), Model()], torch.randn(V, 8, 6)

    def work(world: Any) -> None:
        tree = FixedTree(DistributedDataParallel(copies[world.rank]), V, threads=1)
        optimizer = torch.optim.AdamW(tree.parameters, fused=True)  # does not increase the version of a tensor
        for step in range(2):
            step_of(tree, inputs, step)
            optimizer.step()
            before = copy.deepcopy(tree.wrapped.state_dict())
            tree.wrapped.module(inputs[0])
            tree.wrapped.load_state_dict(before)  # as after an evaluation of other weights

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_ranks(work, 2)
    tree = FixedTree(copies[0], V, threads=1)
    step_of(tree, inputs)
    tree.wrapped(inputs[0])
    unused = pytest.warns(UserWarning, match="the gradients of step 0 were not used")
    with unused, pytest.warns(UserWarning, match=r"changed elsewhere: after a forward pass in train\(\) mode"):
        step_of(tree, inputs, 1)


def test_random_numbers_follow_from_step_and_logical_rank_only():
    def draw() -> tuple[float, ...]:
        return torch.rand(()).item(), np.random.rand(), random.random()

    model, drawn = nn.Linear(1, 1), {}
    tree = FixedTree(model, V, threads=1)
    states = torch.get_rng_state(), random.getstate()
    for step in (5, 6, 5):
        for logical_rank in tree.logical_ranks:
            with tree.micro_batch(step, logical_rank, seed=1):
                assert drawn.setdefault((step, logical_rank), numbers := draw()) == numbers
                model(torch.ones(1, 1)).sum().backward()
    assert len(set(drawn.values())) == 2 * V
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def enter(tree: FixedTree, step: int, logical_rank: int) -> None:
    with tree.micro_batch(step, logical_rank):
        tree.wrapped(torch.ones(1, 1)).sum().backward()


def test_a_mistake_in_the_loop_names_what_to_do(monkeypatch):
    tree = FixedTree(nn.Linear(1, 1), V, threads=1)
    with pytest.raises(ValueError, match="logical rank 0 of another step is next"):
        enter(tree, 0, 1)
    with pytest.raises(RuntimeError, match=r"call backward\(\) inside"), tree.micro_batch(0, 0):
        pass
    tree = FixedTree(nn.Linear(1, 1), 2, threads=1)
    enter(tree, 0, 0)
    with pytest.raises(RuntimeError, match=r"first train on logical rank\(s\) \[1\]"):
        tree.clip_grad_norm_(1.0)
    with pytest.raises(ValueError, match="logical rank 1 of step 0 is next"):
        enter(tree, 1, 0)
    optimizer = torch.optim.SGD(tree.parameters)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"call optimizer\.step\(\) after the loop"):
        enter(tree, 0, 1)
    tree = FixedTree(tree.wrapped, 1, threads=1)
    enter(tree, 0, 0)
    tree.clip_grad_norm_(1.0)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"first train on logical rank\(s\) \[0\]"):
        tree.clip_grad_norm_(1.0)
    with pytest.raises(ValueError, match="logical rank 0 of another step is next"):
        enter(tree, 0, 0)
    monkeypatch.setitem(GradientState().plugin_kwargs, "num_steps", 2)  # what Accelerator does with it
    with pytest.raises(ValueError, match="remove gradient_accumulation_steps"):
        enter(tree, 1, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedTree(nn.Linear(1, 1), 6), "logical_ranks=6 with 1 .*power of two"),
        (lambda: FixedTree(nn.SyncBatchNorm(3), 2), "use BatchNorm or GroupNorm"),
        (lambda: FixedTree(nn.Embedding(3, 2, sparse=True), 2), "sparse=False"),
        (
            lambda: FixedTree(nn.Linear(1, 1), 2, threads=1).trace_tensors("a.jsonl", 0, 2),
            r"step 1 is micro_batch\(step=0",
        ),
        (lambda: FixedTreeSampler(range(50), 6, 4), "batch_size=6: .* a multiple of logical_ranks=4"),
        (lambda: FixedTreeSampler(range(50), 64, 4), "at most the 50 rows"),
        (lambda: (rows := FixedTreeSampler(range(50), 4, 4)).set_epoch(1, 12) or next(iter(rows)), "which has 12"),
    ],
)
def test_a_mistake_before_the_loop_names_what_to_pass(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_mistakes_that_need_several_processes():
    def work(world: Any) -> None:
        with pytest.raises(TypeError, match=r"pass DistributedDataParallel\(model\), not Linear"):
            FixedTree(nn.Linear(1, 1), 2)
        with pytest.raises(ValueError, match="with 2 process"):
            FixedTree(nn.Linear(1, 1), 1)
        with pytest.raises(ValueError, match="pass the same values"):
            FixedTree(DistributedDataParallel(nn.Linear(1, 1)), 2 + 2 * world.rank, threads=1)
        # A second exchange would add the sum of the other logical ranks once more.
        for calls_of_ddp, message in ((0, "exchanged gradients 0 times"), (2, r"call backward\(\) once")):
            tree = FixedTree(DistributedDataParallel(nn.Linear(1, 1)), 2, threads=1)
            context = tree.micro_batch(0, tree.logical_ranks[0])
            models = [tree.wrapped] * calls_of_ddp or [tree.wrapped.module]
            with pytest.raises(RuntimeError, match=message), context:
                assert all(model(torch.ones(1, 1)).sum().backward() is None for model in models)
        model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        model.forward = model[0].forward
        tree = FixedTree(DistributedDataParallel(model), 2, threads=1)
        with pytest.raises(ValueError, match=r"^1\.weight has no gradient in micro_batch"):
            enter(tree, 0, tree.logical_ranks[0])

    on_ranks(work, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_accumulation_steps": 3}, "raise logical_ranks"),
        ({"average_tokens_across_devices": False}, "average_tokens"),
        ({"logical_ranks": 0}, "logical_ranks=0"),
    ],
)
def test_arguments_that_the_trainer_cannot_keep_are_rejected(tmp_path, changes, message):
    class TreeTrainer(FixedTreeTrainerMixin, Trainer):
        logical_ranks = changes.pop("logical_ranks", 4)

    args = TrainingArguments(str(tmp_path), use_cpu=True, **changes)
    with pytest.raises(ValueError, match=message):
        TreeTrainer(nn.Linear(1, 1), args)
