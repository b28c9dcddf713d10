"""A loaded training state is bitwise identical to the saved one, under any strategy and number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.training_states import new_state, train
from helpers.worlds import batch_plan, process_group_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from app.checkpoint.state import TrainingState
from app.common.errors import UserError
from app.distributed.world import World
from app.runs.schema import SCHEDULE, SHARDS
from app.settings import Settings
from app.strategies.ddp import DDPStrategy
from app.strategies.optimization import LossScale, Optimization

# ---- one rank: training resumes --------------------------------------------------------------------------------------

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


@pytest.fixture
def saved(tmp_path) -> Path:
    with process_group_of(0, 1) as world:
        training = new_state(("ddp", 1), world, seed=0)
        train(training, 0, 1)
        training.save(tmp_path)
    return tmp_path


@pytest.mark.parametrize("saved_by", STRATEGIES)
@pytest.mark.parametrize("loaded_by", STRATEGIES)
def test_training_continues_as_if_it_had_not_been_interrupted(tmp_path, saved_by, loaded_by):
    with process_group_of(0, 1) as world:
        training = new_state((saved_by, 1), world, seed=0)
        train(training, 0, 5)
        with torch.no_grad():  # after an evaluation, zero2 still has the complete parameters
            training.model.eval()(torch.randn(4, 6))
        training.model.train()
        training.save(tmp_path)
        uninterrupted = train(training, 5, 7)
        weights = training.strategy.gather_model_state(training.model)

        resumed = new_state((loaded_by, 1), world, seed=1)
        train(resumed, 0, 2)  # its state differs from the saved one
        resumed.load(tmp_path)
        assert train(resumed, 5, 7) == uninterrupted
        found = resumed.strategy.gather_model_state(resumed.model)
        assert found.keys() == weights.keys()
        for name, value in weights.items():
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value), name
        schedules = [one.optimization.scheduler.state_dict() for one in (resumed, training)]
        assert [schedule["last_epoch"] for schedule in schedules] == [12, 12]
        assert resumed.model.out.weight is resumed.model.into.weight, "the weights are no longer tied"
        assert resumed.model.temporary.tolist() == [1.0] * 4, "not part of the model's state"
        assert all(parameter.grad is None for parameter in resumed.model.parameters())


def test_the_files_are_tensors_and_numbers_neither_code_nor_random_states(saved):
    shard = SHARDS.format(rank=0, size=1)
    assert sorted(path.name for path in saved.iterdir()) == [SCHEDULE, shard]
    names = load_file(saved / shard).keys()
    assert {name.partition(".")[0] for name in names} == {"model", "exp_avg", "exp_avg_sq", "step"}
    content = json.loads((saved / SCHEDULE).read_text())
    assert content.keys() == {"schedule", "loss_scale"}
    assert content["schedule"]["last_epoch"] == 1
    assert "lr_lambdas" not in content["schedule"]


def test_a_parameter_that_is_not_contiguous_is_saved_and_loaded(tmp_path):
    def new(seed: int, world: World) -> TrainingState:
        torch.manual_seed(seed)
        model = nn.Module()
        model.register_parameter("scale", nn.Parameter(torch.randn(3, 2).t()))
        optimizer = torch.optim.AdamW(model.parameters())
        model.scale.square().sum().backward()
        optimizer.step()
        scheduler, strategy = LambdaLR(optimizer, lambda step: 1.0), DDPStrategy(Settings(), batch_plan(), world)
        optimization = Optimization(optimizer, scheduler, LossScale("fp32", strategy.plan, world))
        return TrainingState(model, optimization, strategy, world)

    with process_group_of(0, 1) as world:
        before, after = new(0, world), new(1, world)
        before.save(tmp_path)
        after.load(tmp_path)
    assert torch.equal(after.model.scale, before.model.scale)
    assert after.model.scale.stride() == (1, 2)
    for key, value in before.optimization.optimizer.state[before.model.scale].items():
        loaded = after.optimization.optimizer.state[after.model.scale][key]
        assert torch.equal(loaded, value)
        assert loaded.stride() == value.stride()


# ---- what is not a checkpoint of this model -------------------------------------------------------------------------


def load(folder: Path) -> None:
    with process_group_of(0, 1) as world:
        new_state(("zero3", 1), world, seed=1).load(folder)


@pytest.mark.parametrize("name", [SHARDS.format(rank=0, size=1), SCHEDULE])
@pytest.mark.parametrize("size", [0, 5])
def test_a_damaged_file_is_a_mistake_that_names_the_checkpoint(saved, name, size):
    """Another node may see other contents than rank 0, which has checked all files."""
    (saved / name).write_bytes((saved / name).read_bytes()[:size])
    with pytest.raises(UserError, match=f"{saved.name}: .+"):
        load(saved)


@pytest.mark.parametrize("name", ["model.into.weight", "exp_avg.into.weight"])
@pytest.mark.parametrize("change", ["other name", "other shape"])
def test_a_checkpoint_of_another_model_is_rejected(saved, name, change):
    path = saved / SHARDS.format(rank=0, size=1)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensor = tensors.pop(name)
    if change == "other name":
        tensors["other"] = tensor
        metadata = {key: value.replace(f'"{name}"', '"other"') for key, value in metadata.items()}
    else:
        tensors[name] = tensor[:, :5].contiguous()
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(UserError, match=f"is not a checkpoint of this model: .*{name}"):
        load(saved)
