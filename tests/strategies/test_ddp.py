"""DDP and ZeRO-1: gradients are averaged over the logical ranks once per step, and state is gathered on rank 0."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from helpers.architectures import CONFIGS
from helpers.gradients import add_neighbors, flat_gradients, gradients_of_logical_ranks
from helpers.worlds import batch_plan, fake_world, process_group_of
from torch import nn
from transformers import AutoModelForSequenceClassification

from app.common.errors import AgreedError
from app.distributed.world import World
from app.settings import Settings
from app.strategies.ddp import DDPStrategy, Zero1Strategy


@pytest.fixture
def world() -> Iterator[World]:
    """A process group of one rank, which tests of several ranks can replace by their own."""
    with process_group_of(0, 1) as alone:
        yield alone


class Model(nn.Module):
    """Two layers, of which the second one can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, use_second: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return (self.second(hidden) if use_second else hidden).square().mean()


def wrap(world, logical_ranks: int = 1, accumulation: int = 1, **settings) -> tuple[DDPStrategy, nn.Module]:
    torch.manual_seed(0)
    strategy = DDPStrategy(Settings(**settings), batch_plan(1, logical_ranks, accumulation), world)
    return strategy, strategy.wrap(Model())


def backward(
    strategy: DDPStrategy, wrapped: nn.Module, uses_of_second: list[bool], accumulation: int = 1
) -> torch.Tensor:
    """Run the micro-batches of a step. Return the gradients that they should have, from a copy of the plain model."""
    inputs = torch.randn(len(uses_of_second), accumulation, 4, 6)
    leaves = gradients_of_logical_ranks(wrapped.module, inputs, uses_of_second)
    for number, x in enumerate(inputs.flatten(0, 1)):
        with strategy.accumulate(wrapped, number):
            (wrapped(x, uses_of_second[number // accumulation]) / (len(leaves) * accumulation)).backward()
    if len(leaves) == 16:
        assert not torch.equal(sum(leaves), add_neighbors(leaves)), "the order of the additions makes no difference"
    return add_neighbors(leaves)


@pytest.mark.parametrize(("logical_ranks", "accumulation"), [(1, 1), (1, 3), (2, 1), (4, 2), (8, 1), (16, 1)])
def test_a_process_adds_the_gradients_of_its_logical_ranks_as_a_tree(world, logical_ranks, accumulation):
    strategy, wrapped = wrap(world, logical_ranks, accumulation)
    for _ in range(3):  # nothing of a step may remain in the next one
        expected = backward(strategy, wrapped, [True] * logical_ranks, accumulation)
        assert torch.equal(flat_gradients(list(wrapped.parameters())), expected)
        wrapped.zero_grad()


@pytest.mark.parametrize("logical_ranks", [1, 2, 4])
def test_a_parameter_without_a_gradient_is_an_error_in_the_first_step(world, logical_ranks):
    strategy, wrapped = wrap(world, logical_ranks)
    with pytest.raises(AgreedError, match=r"2 of the model's parameters, such as second\.weight, take no part"):
        backward(strategy, wrapped, [False] * logical_ranks)


@pytest.mark.parametrize("logical_ranks", [1, 2, 4])
def test_ddp_can_be_set_to_find_parameters_without_a_gradient(world, logical_ranks):
    strategy, wrapped = wrap(world, logical_ranks, ddp_find_unused_parameters=True)
    for _ in range(2):
        expected = backward(strategy, wrapped, [False] * logical_ranks)
        assert torch.equal(flat_gradients(list(wrapped.parameters())), expected)
        assert [p.grad for p in wrapped.module.second.parameters()] == [None, None], "AdamW would update them"
        assert strategy.clip_grad_norm(wrapped, float("inf"), torch.ones(())) == expected.double().norm().float()
        wrapped.zero_grad()


@pytest.mark.parametrize("uses", [[True, False], [False, True], [False, True, False, False], [True, True, True, False]])
def test_a_parameter_that_only_some_logical_ranks_use_gets_their_gradients(world, uses):
    """As it does if each logical rank is a process of its own."""
    strategy, wrapped = wrap(world, len(uses), ddp_find_unused_parameters=True)
    for _ in range(2):
        expected = backward(strategy, wrapped, uses)
        assert torch.equal(flat_gradients(list(wrapped.parameters())), expected)
        wrapped.zero_grad()


def test_gradients_are_checked_only_once(world):
    """Later steps may leave out parameters only if DDP is set to find them, which it checks itself."""
    strategy, wrapped = wrap(world)
    backward(strategy, wrapped, [True])
    wrapped.zero_grad()
    backward(strategy, wrapped, [False])
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
        backward(strategy, wrapped, [True])


def test_the_model_state_is_gathered_on_rank_0_only():
    source = nn.Linear(2, 2)
    first, second = (DDPStrategy(Settings(), batch_plan(2), fake_world(rank, 2)) for rank in range(2))
    state = first.gather_model_state(source)
    assert state.keys() == source.state_dict().keys()
    assert second.gather_model_state(source) == {}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_zero1_gives_each_parameter_to_the_optimizer_of_one_rank(ranks):
    owned = []
    for rank in range(ranks):
        torch.manual_seed(0)
        model = Model()
        with process_group_of(rank, ranks) as world:
            strategy = Zero1Strategy(Settings(strategy="zero1"), batch_plan(ranks), world)
            wrapped = strategy.wrap(model)
            groups = [{"params": list(wrapped.parameters()), "weight_decay": 0.5}]
            optimizer = strategy.build_optimizer(groups, lr=0.25, betas=(0.5, 0.75), eps=0.125)
            (group,) = strategy.local_optimizer(optimizer).param_groups
            settings = {name: group[name] for name in ("weight_decay", "lr", "betas", "eps")}
            assert settings == {"weight_decay": 0.5, "lr": 0.25, "betas": (0.5, 0.75), "eps": 0.125}
            mine = {id(parameter) for parameter in group["params"]}
        owned += [name for name, parameter in model.named_parameters() if id(parameter) in mine]
        assert type(strategy.local_optimizer(optimizer)) is torch.optim.AdamW
    assert sorted(owned) == sorted(name for name, _ in Model().named_parameters())


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_zero1_keeps_parameters_aligned(ranks, name):
    """GPU kernels that load 16 bytes at once would otherwise be replaced by others, which round differently."""
    config = copy.deepcopy(CONFIGS[name])
    config.vocab_size = 51
    model = AutoModelForSequenceClassification.from_config(config)
    groups = [{"params": [p for p in model.parameters() if (p.ndim >= 2) == matrices]} for matrices in (True, False)]
    with process_group_of(0, ranks) as world:
        Zero1Strategy(Settings(strategy="zero1"), batch_plan(ranks), world).build_optimizer(groups, lr=1e-3)
    assert any(parameter.storage_offset() for parameter in model.parameters()), "they are views of one tensor"
    assert [n for n, p in model.named_parameters() if p.storage_offset() * p.element_size() % 16] == []
