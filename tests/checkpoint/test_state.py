"""A loaded training state is bitwise identical to the saved one: weights, optimizer, schedule and random states."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from worlds import fake_world

from app.checkpoint import state
from app.checkpoint.random_state import get_random_state
from app.checkpoint.state import TrainingState, read_weights, write_weights
from app.runs.resume import Resume, changes_since
from app.settings import Settings
from app.strategies.ddp import DDP

WORLD = fake_world()


class Model(nn.Module):
    """Two tied matrices, dropout, a buffer, a parameter that is not a matrix and one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 6), nn.Linear(6, 6)
        self.out.weight = self.into.weight
        self.dropout = nn.Dropout(0.3)
        self.scale = nn.Parameter(torch.ones(3, 2).t())
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.out(self.dropout(self.into(x))) * self.scale.sum()


def new_state(world=WORLD) -> TrainingState:
    torch.manual_seed(0)
    model = Model()
    groups = [
        {"params": [model.into.weight], "weight_decay": 0.1},
        {"params": [model.into.bias, model.out.bias, model.scale], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return TrainingState(model, optimizer, scheduler, DDP(Settings(), world), world)


def train(training: TrainingState, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 6) + random.random() + np.random.rand()
        loss = training.model(x).square().mean()
        loss.backward()
        training.optimizer.step()
        training.scheduler.step()
        training.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture
def single_rank(monkeypatch):
    monkeypatch.setattr(state, "all_gather_object", lambda value, world: [value])


def resume_at(folder, *changes):
    return Resume(folder, folder, {"step": 5, "settings": {"seed": 42}}, changes=changes)


def test_training_continues_as_if_it_had_not_been_interrupted(tmp_path, single_rank):
    training = new_state()
    train(training, 5)
    training.save(tmp_path)
    undisturbed = train(training, 7)

    resumed = new_state()
    train(resumed, 2)  # its state and its generators differ from the saved ones
    resumed.load(resume_at(tmp_path))
    assert train(resumed, 7) == undisturbed
    for (name, a), b in zip(training.model.state_dict().items(), resumed.model.state_dict().values(), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), name
    assert resumed.scheduler.state_dict()["last_epoch"] == training.scheduler.state_dict()["last_epoch"] == 12
    assert resumed.model.out.weight is resumed.model.into.weight, "the weights are no longer tied"


def test_the_files_contain_no_code(tmp_path, single_rank):
    training = new_state()
    train(training, 1)
    training.save(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".json"}
    contents = [path.read_bytes() for path in tmp_path.iterdir()]
    assert not any(b"\x80\x04" in content[:2] or b"pickle" in content for content in contents)


def test_only_rank_0_writes(tmp_path, single_rank):
    training = new_state(fake_world(1, 2))
    train(training, 1)
    training.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_at_another_world_size_dropout_differs_from_the_first_steps_and_between_ranks(tmp_path, single_rank):
    training = new_state()
    train(training, 1)
    training.save(tmp_path)
    draws = []
    for rank in range(2):
        new_state(fake_world(rank, 2)).load(resume_at(tmp_path, "ranks: 2, was 1"))
        draws.append(torch.rand(3).tolist())
    torch.manual_seed(42)
    assert torch.rand(3).tolist() not in draws
    assert draws[0] != draws[1]


def test_each_rank_gets_its_own_random_state(tmp_path, monkeypatch):
    training = new_state(fake_world(0, 11))
    train(training, 1)
    states, expected = [], []
    for rank in range(11):  # two digits: the prefix "1." must not match rank 11
        torch.manual_seed(rank)
        np.random.seed(rank)
        random.seed(rank)
        states.append({name: value.numpy() for name, value in get_random_state(WORLD).items()})
        expected.append((torch.rand(1).item(), np.random.rand(), random.random()))
    monkeypatch.setattr(state, "all_gather_object", lambda value, world: states)
    training.save(tmp_path)
    for rank in range(11):
        new_state(fake_world(rank, 11)).load(resume_at(tmp_path))
        assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected[rank]


def test_weights_that_share_memory_are_written_and_read(tmp_path):
    model, other = Model(), Model()
    write_weights(tmp_path, model.state_dict())
    other.load_state_dict(read_weights(tmp_path))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_resuming_on_another_device_seeds_again(tmp_path, single_rank):
    """A checkpoint of a CPU run has no state of a GPU's generator, and vice versa."""
    before = {"world_size": 1, "settings": {"gradient_accumulation_steps": 1}}
    gpu = fake_world(device="cuda:0")
    same = Settings()
    assert changes_since(before | {"device": "cpu"}, same, WORLD) == ()
    assert changes_since(before | {"device": "cpu"}, same, gpu) == ("device: cuda, was cpu",)
    assert changes_since(before | {"device": "cuda"}, same, WORLD) == ("device: cpu, was cuda",)
    training = new_state()
    train(training, 1)
    training.save(tmp_path)
    new_state(gpu).load(resume_at(tmp_path, "device: cuda, was cpu"))  # no KeyError


def test_another_number_of_accumulation_steps_is_announced():
    before = {"world_size": 1, "device": "cpu", "settings": {"gradient_accumulation_steps": 2}}
    assert changes_since(before, Settings(), WORLD) == ("accumulation steps: 1, was 2",)
    assert changes_since(before, Settings(gradient_accumulation_steps=2), WORLD) == ()
