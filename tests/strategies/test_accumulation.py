"""Under every strategy, at every number of ranks, the gradients of all logical ranks are added as one tree.

The ranks are threads, connected by gloo. tests/launched has processes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.worlds import batch_plan
from strategies.ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from app.common.errors import AgreedError
from app.distributed.world import World
from app.settings import Settings
from app.strategies.base import local_part
from app.strategies.compression import HOOK_DTYPES
from app.strategies.optimization import loss_factor
from app.strategies.reduction import FixedOrderAllReduce, TreeSum, buckets_in_flight
from app.training.build import select_strategy

SMALL = {"bucket_cap_mb": 1e-5}  # each parameter in a bucket of its own
# Settings, and the precision in which gradients are exchanged. `zero1` accumulates as `ddp`.
VARIANTS: list[tuple[dict[str, Any], torch.dtype]] = [
    ({"strategy": "ddp"}, torch.float32),
    ({"strategy": "ddp", **SMALL}, torch.float32),
    ({"strategy": "ddp", **SMALL, "ddp_comm_hook": "bf16"}, torch.bfloat16),
    ({"strategy": "ddp", "ddp_comm_hook": "fp16", "precision": "fp16"}, torch.float16),
    ({"strategy": "zero2"}, torch.float32),
    ({"strategy": "zero3"}, torch.float32),
    ({"strategy": "zero3", "reduce_dtype": "bf16"}, torch.bfloat16),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.linear.weight.dtype
        return torch.tanh(self.linear(x))


class TwoBlocks(PreTrainedModel):
    """Two blocks, of which the second one can be left out."""

    config_class = PreTrainedConfig
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__(PreTrainedConfig(num_hidden_layers=2))
        self.first, self.second, self.out = Block(), Block(), nn.Linear(6, 2)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: torch.Tensor, use_second: bool = True) -> torch.Tensor:
        hidden = self.first(x)
        return self.out(self.second(hidden) if use_second else hidden).square().mean()


def flat_gradients(model: nn.Module) -> torch.Tensor:
    """All gradients in one vector, with zeros for parameters that have none."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    complete = [gradient.full_tensor() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    return torch.cat([gradient.flatten() for gradient in complete])


def add_neighbors(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """The definition of the tree: add neighbors until one is left. An unpaired last one is carried on."""
    while len(leaves) > 1:
        pairs = [a + b for a, b in zip(leaves[0::2], leaves[1::2], strict=False)]
        leaves = [*pairs, *leaves[2 * len(pairs) :]]
    return leaves[0]


def train(
    world: World, model: TwoBlocks, steps: torch.Tensor, uses: Sequence[bool], **options: Any
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the gradients of each step and their norm.

    Args:
        steps: the inputs, of shape (steps, logical ranks, micro-batches of each, …).
        uses: whether a logical rank uses the second block.
    """
    bucket_cap_mb = options.pop("bucket_cap_mb", None)  # smaller than --ddp_bucket_cap_mb can be
    plan, settings = batch_plan(world.size, len(uses), steps.shape[2]), Settings(**options)
    strategy = select_strategy(settings, plan, world)
    strategy.bucket_cap_mb = bucket_cap_mb
    wrapped = strategy.wrap(model)
    factor, found = loss_factor(settings.precision, plan), []
    for inputs in steps:
        wrapped.zero_grad()
        micro_batches = [(x, uses[rank]) for rank in strategy.logical_ranks for x in inputs[rank]]
        for number, (x, use_second) in enumerate(micro_batches):
            with strategy.accumulate(wrapped, number):
                (wrapped(x, use_second) * factor / len(micro_batches)).backward()
        norm = strategy.clip_grad_norm(float("inf"), torch.tensor(float(factor)))
        found.append((flat_gradients(model), norm))
        has_gradient = [parameter.grad is not None for parameter in model.second.parameters()]
        assert has_gradient == [any(uses)] * 2, "AdamW would update a parameter whose gradient is zero"
    return found


def gradients_of_logical_ranks(model: TwoBlocks, inputs: torch.Tensor, uses: Sequence[bool]) -> list[torch.Tensor]:
    leaves = []
    for micro_batches, use_second in zip(inputs, uses, strict=True):
        model.zero_grad()
        for x in micro_batches:
            (model(x, use_second) / len(micro_batches)).backward()
        leaves.append(flat_gradients(model))
    return leaves


ALL, PARTLY, NONE = [True], [True, True, False, False], [False] * 2
ONE_RANK = [(1, ALL), (3, ALL * 2), (1, ALL * 16), (3, [True, False]), (1, [False, True]), (3, PARTLY), (1, NONE)]
LAYOUTS = [  # ranks, on each node, micro-batches of a logical rank, and which logical ranks use the second block
    *[(1, 1, *rest) for rest in ONE_RANK],
    *[(2, 2, *rest) for rest in ((1, ALL * 2), (3, ALL * 4), (1, PARTLY), (3, NONE))],
    (4, 4, 3, ALL * 8),
    (5, 5, 1, ALL * 5),  # the tree has unpaired leaves
    (4, 2, 1, ALL * 8),  # first inside the nodes, then between them
    (6, 2, 1, ALL * 6),
    (6, 3, 1, ALL * 6),  # the tree adds ranks of two nodes before a node is complete
]


@pytest.mark.parametrize(("ranks", "inside", "accumulation", "uses"), LAYOUTS)
def test_the_gradients_of_all_logical_ranks_are_added_as_a_tree(ranks, inside, accumulation, uses):
    """A parameter that only some of them use gets their gradients, as if each were a process of its own.

    A gradient is rounded when all micro-batches of its logical rank are added, even on a single rank.
    """
    torch.manual_seed(0)
    model, steps = TwoBlocks(), torch.randn(2, len(uses), accumulation, 4, 6)
    leaves_of_steps = [gradients_of_logical_ranks(copy.deepcopy(model), inputs, uses) for inputs in steps]
    models = [[copy.deepcopy(model) for _ in VARIANTS] for _ in range(ranks)]

    def work(world: World) -> list[Any]:
        found = []
        for (options, _), copied in zip(VARIANTS, models[world.rank], strict=True):
            finds = not all(uses) and (options["strategy"] == "ddp" or not any(uses))
            found.append(train(world, copied, steps, uses, ddp_find_unused_parameters=finds, **options))
        return found

    for found_of_rank in on_ranks(work, ranks, inside):
        for (options, dtype), found in zip(VARIANTS, found_of_rank, strict=True):
            for leaves, (gradients, norm) in zip(leaves_of_steps, found, strict=True):
                expected = add_neighbors(leaves) / len(uses)
                if dtype is not torch.float32:
                    rounded = add_neighbors([(leaf / len(uses)).to(dtype) for leaf in leaves]).float()
                    assert not torch.equal(rounded, expected)
                    expected = rounded
                assert torch.equal(gradients, expected), options
                assert norm == expected.double().norm().float()
    for leaves in leaves_of_steps:
        assert len(uses) < 4 or not torch.equal(sum(leaves), add_neighbors(leaves)), "the order must matter here"


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_a_parameter_without_a_gradient_is_an_error_unless_allowed(strategy):
    models, inputs = [TwoBlocks() for _ in range(2)], torch.randn(1, 2, 1, 4, 6)
    with pytest.raises(AgreedError, match=r"2 of the model's parameters, such as second\.linear\.weight"):
        on_ranks(lambda world: train(world, models[world.rank], inputs, [False] * 2, strategy=strategy), 2)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_only_gathered_parameters_are_in_bf16(strategy):
    model, steps = TwoBlocks(), torch.randn(1, 2, 2, 4, 6)
    nn.init.constant_(model.first.linear.weight, 1 + 2**-20)
    options = {"strategy": strategy, "precision": "bf16", "param_dtype": "bf16"}
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    on_ranks(autocast(lambda world: train(world, model, steps, [True] * 2, **options)), 1)
    assert model.first.seen is torch.bfloat16
    for parameter in model.parameters():
        assert local_part(parameter).dtype is local_part(parameter.grad).dtype is torch.float32
    assert (local_part(model.first.linear.weight) == 1 + 2**-20).all(), "the shards are not rounded"


@pytest.mark.parametrize(("hook", "dtype"), [("no", torch.float32), *HOOK_DTYPES.items()])
def test_the_gradients_of_a_transposed_parameter_are_added_element_by_element(hook, dtype):
    model, steps, uses = TwoBlocks(), torch.randn(1, 2, 1, 4, 6), [True] * 2
    model.out.weight = nn.Parameter(torch.randn(6, 2).t())
    leaves = gradients_of_logical_ranks(copy.deepcopy(model), steps[0], uses)
    [[(gradients, norm)]] = on_ranks(lambda world: train(world, model, steps, uses, ddp_comm_hook=hook), 1)
    assert torch.equal(gradients, add_neighbors([(leaf / 2).to(dtype) for leaf in leaves]).float())
    assert norm == gradients.double().norm().float()


@pytest.mark.parametrize(("inside", "most"), [(4, 3), (2, 5)])
def test_as_many_buckets_are_received_at_the_same_time_as_the_plan_assumes(inside, most):
    def work(world: World) -> int:
        hook = FixedOrderAllReduce([], TreeSum(), levels=world.levels, device=world.device)
        for number in range(10):
            hook.exchange(torch.ones(8), is_last=number == 9, divisor=4)
        return len({buffer.data_ptr() for buffer in hook.free})

    assert on_ranks(work, 4, inside) == [most] * 4 == [buckets_in_flight(4 // inside, on_gpus=False)] * 4
    assert buckets_in_flight(1, on_gpus=True) == 1
