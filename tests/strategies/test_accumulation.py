"""Under every strategy, the gradients of a step are those of the logical ranks of a process, added as a tree."""

from __future__ import annotations

import pytest
import torch
from helpers.worlds import batch_plan
from strategies.gradients import add_neighbors, flat_gradients, gradients_of_logical_ranks
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from app.common.errors import AgreedError
from app.distributed.world import World
from app.settings import Settings
from app.strategies.base import Strategy, local_part
from app.training.build import select_strategy

STRATEGIES = ("ddp", "zero2", "zero3")  # `zero1` accumulates as `ddp`
ROUNDED = {"ddp": {"ddp_comm_hook": "bf16"}, "zero2": {"reduce_dtype": "bf16"}, "zero3": {"reduce_dtype": "bf16"}}
SIXTEEN = [True] * 16


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
        torch.manual_seed(0)
        self.first, self.second, self.out = Block(), Block(), nn.Linear(6, 2)
        self.post_init()

    def forward(self, x: torch.Tensor, use_second: bool = True) -> torch.Tensor:
        hidden = self.first(x)
        return self.out(self.second(hidden) if use_second else hidden).square().mean()


def wrap(world: World, logical_ranks: int, accumulation: int = 1, **settings) -> tuple[Strategy, nn.Module]:
    strategy = select_strategy(Settings(**settings), batch_plan(1, logical_ranks, accumulation), world)
    return strategy, strategy.wrap(TwoBlocks())


def step(strategy: Strategy, wrapped: nn.Module, inputs: torch.Tensor, uses_of_second: list[bool]) -> torch.Tensor:
    """Run the micro-batches of a step, and return the gradients. `inputs` is (logical ranks, micro-batches, …)."""
    wrapped.zero_grad()
    accumulation = inputs.shape[1]
    for number, x in enumerate(inputs.flatten(0, 1)):
        with strategy.accumulate(wrapped, number):
            (wrapped(x, uses_of_second[number // accumulation]) / len(inputs) / accumulation).backward()
    return local_part(flat_gradients(list(wrapped.module.parameters()))).clone()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    "uses", [[True], [True] * 2, SIXTEEN, [True, False], [False, True], [False, True, False, False]]
)
def test_a_process_adds_the_gradients_of_its_logical_ranks_as_a_tree(world, strategy, is_rounded, accumulation, uses):
    """A parameter that only some of them use gets their gradients, as if each were a process of its own.

    A gradient is rounded when all micro-batches of its logical rank are added, even on a single rank.
    """
    changes = ROUNDED[strategy] if is_rounded else {}
    finds_unused = strategy == "ddp" and not all(uses)
    zero, wrapped = wrap(
        world, len(uses), accumulation, strategy=strategy, ddp_find_unused_parameters=finds_unused, **changes
    )
    for _ in range(2):  # nothing of a step may remain in the next one
        inputs = torch.randn(len(uses), accumulation, 4, 6)
        leaves = gradients_of_logical_ranks(TwoBlocks(), inputs, uses)
        found = step(zero, wrapped, inputs, uses)
        rounded = add_neighbors([leaf.bfloat16() for leaf in leaves]).float()
        assert torch.equal(found, rounded if is_rounded else add_neighbors(leaves))
        assert not torch.equal(rounded, add_neighbors(leaves)), "rounding makes no difference here"
        if uses == SIXTEEN:
            assert not torch.equal(sum(leaves), add_neighbors(leaves)), "the order makes no difference here"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("logical_ranks", [1, 2, 4])
def test_a_parameter_without_a_gradient_is_an_error_in_the_first_step_unless_allowed(world, strategy, logical_ranks):
    inputs, uses = torch.randn(logical_ranks, 1, 4, 6), [False] * logical_ranks
    zero, wrapped = wrap(world, logical_ranks, strategy=strategy)
    with pytest.raises(AgreedError, match=r"2 of the model's parameters, such as second\.linear\.weight, take no part"):
        step(zero, wrapped, inputs, uses)
    zero, wrapped = wrap(world, logical_ranks, strategy=strategy, ddp_find_unused_parameters=True)
    expected = add_neighbors(gradients_of_logical_ranks(TwoBlocks(), inputs, uses))
    for _ in range(2):
        assert torch.equal(step(zero, wrapped, inputs, uses), expected)
        assert [p.grad for p in wrapped.module.second.parameters()] == [None, None], "AdamW would update them"
        assert zero.clip_grad_norm(float("inf"), torch.ones(())) == expected.double().norm().float()


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("param_dtype", ["fp32", "bf16"])
def test_only_gathered_parameters_are_in_bf16(world, strategy, param_dtype):
    zero, wrapped = wrap(world, 2, 2, strategy=strategy, precision="bf16", param_dtype=param_dtype)
    block = wrapped.module.first
    with torch.no_grad():
        local_part(block.linear.weight).fill_(1 + 2**-20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step(zero, wrapped, torch.randn(2, 2, 4, 6), [True, True])
    assert block.seen is (torch.bfloat16 if param_dtype == "bf16" else torch.float32)
    for parameter in wrapped.module.parameters():
        assert local_part(parameter).dtype is local_part(parameter.grad).dtype is torch.float32
    assert (local_part(block.linear.weight) == 1 + 2**-20).all(), "the shards are not rounded"
