"""ZeRO-1: which rank updates a parameter, and where in memory it is."""

from __future__ import annotations

import copy

import pytest
from helpers.architectures import CONFIGS
from helpers.worlds import batch_plan, process_group_of
from torch import nn
from transformers import AutoModelForSequenceClassification

from app.settings import Settings
from app.strategies.ddp import Zero1Strategy


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_optimizer_of_one_rank_updates_a_parameter(ranks):
    owned = []
    for rank in range(ranks):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        with process_group_of(rank, ranks) as world:
            strategy = Zero1Strategy(Settings(strategy="zero1"), batch_plan(ranks), world)
            optimizer = strategy.build_optimizer([{"params": list(model.parameters())}], lr=0.25)
        mine = {id(p) for group in strategy.local_optimizer(optimizer).param_groups for p in group["params"]}
        owned += [name for name, parameter in model.named_parameters() if id(parameter) in mine]
    assert sorted(owned) == ["0.bias", "0.weight", "1.bias", "1.weight"]


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_stay_aligned(name):
    """GPU kernels that load 16 bytes at once would otherwise be replaced by others, which round differently."""
    config = copy.deepcopy(CONFIGS[name])
    config.vocab_size = 51
    for ranks in (1, 2, 4):
        model = AutoModelForSequenceClassification.from_config(config)
        groups = [
            {"params": [p for p in model.parameters() if (p.ndim >= 2) == matrices]} for matrices in (True, False)
        ]
        with process_group_of(0, ranks) as world:
            Zero1Strategy(Settings(strategy="zero1"), batch_plan(ranks), world).build_optimizer(groups, lr=1e-3)
        assert any(parameter.storage_offset() for parameter in model.parameters()), "they are views of one tensor"
        assert [n for n, p in model.named_parameters() if p.storage_offset() * p.element_size() % 16] == []
