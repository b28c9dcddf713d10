"""What is read back is what was written, to the bit: weights, optimizer, schedule and every random stream."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from worlds import fake_world

from app.checkpoint import state
from app.checkpoint.state import (
    random_streams,
    read_training_state,
    read_weights,
    restore_streams,
    write_training_state,
    write_weights,
)
from app.runs.resume import Resume, changes_since
from app.settings import Settings

WORLD = fake_world()


class Model(nn.Module):
    """Two tied matrices, dropout, a buffer, a parameter that is no matrix and one that is not contiguous."""

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


def training():
    torch.manual_seed(0)
    model = Model()
    groups = [
        {"params": [model.into.weight], "weight_decay": 0.1},
        {"params": [model.into.bias, model.out.bias, model.scale], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def run(model, optimizer, scheduler, steps):
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 6) + random.random() + np.random.rand()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(state, "all_gather_object", lambda value, world: [value])


def resume_at(folder, *changes):
    return Resume(folder, folder, {"step": 5, "settings": {"seed": 42}}, changes=changes)


def test_training_goes_on_as_if_it_had_never_stopped(tmp_path, alone):
    whole = training()
    run(*whole, 5)
    write_training_state(*whole, WORLD, tmp_path)
    undisturbed = run(*whole, 7)

    resumed = training()
    run(*resumed, 2)  # in another state, at another place of every stream
    read_training_state(resume_at(tmp_path), *resumed, WORLD)
    assert run(*resumed, 7) == undisturbed
    for (name, a), b in zip(whole[0].state_dict().items(), resumed[0].state_dict().values(), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), name
    assert resumed[2].state_dict()["last_epoch"] == whole[2].state_dict()["last_epoch"] == 12
    assert resumed[0].out.weight is resumed[0].into.weight, "the tie is cut"


def test_the_files_hold_no_code(tmp_path, alone):
    whole = training()
    run(*whole, 1)
    write_training_state(*whole, WORLD, tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".json"}
    assert not any(
        b"\x80\x04" in path.read_bytes()[:2] or b"pickle" in path.read_bytes() for path in tmp_path.iterdir()
    )


def test_at_another_number_of_ranks_the_dropout_is_neither_that_of_the_beginning_nor_alike(tmp_path, alone):
    whole = training()
    run(*whole, 1)
    write_training_state(*whole, WORLD, tmp_path)
    draws = []
    for rank in range(2):
        read_training_state(resume_at(tmp_path, "ranks: 2, was 1"), *training(), fake_world(rank, 2))
        draws.append(torch.rand(3).tolist())
    torch.manual_seed(42)
    assert torch.rand(3).tolist() not in draws
    assert draws[0] != draws[1]


def test_each_rank_gets_its_own_streams_back(tmp_path, monkeypatch):
    whole = training()
    run(*whole, 1)
    streams, expected = [], []
    for rank in range(11):  # two digits: "1." is also the beginning of no other rank's name
        torch.manual_seed(rank)
        np.random.seed(rank)
        random.seed(rank)
        streams.append({name: stream.numpy() for name, stream in random_streams(WORLD).items()})
        expected.append((torch.rand(1).item(), np.random.rand(), random.random()))
    monkeypatch.setattr(state, "all_gather_object", lambda value, world: streams)
    write_training_state(*whole, fake_world(0, 11), tmp_path)
    for rank in range(11):
        world = fake_world(rank, 11)
        read_training_state(resume_at(tmp_path), *training(), world)
        assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected[rank]


@given(seed=st.integers(0, 2**32 - 1), drawn=st.integers(0, 1300), gaussian=st.booleans())
def test_every_stream_goes_on_from_any_place(seed, drawn, gaussian):
    """A Gaussian too many waits in numpy's and Python's streams where an odd number of them was drawn."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    torch.rand(drawn), np.random.rand(drawn), [random.random() for _ in range(drawn)]
    if gaussian:
        torch.randn(1), np.random.randn(), random.gauss(0, 1)

    def draw():
        return (
            *(torch.rand(3).tolist(), torch.randn(17).tolist()),
            *(np.random.rand(3).tolist(), np.random.randn(3).tolist()),
            *([random.random() for _ in range(3)], [random.gauss(0, 1) for _ in range(3)]),
        )

    before = {name: stream.clone() for name, stream in random_streams(WORLD).items()}
    expected = draw()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    restore_streams(before, WORLD)
    assert draw() == expected


def test_weights_that_share_memory_are_written_and_read(tmp_path):
    model, other = Model(), Model()
    write_weights(tmp_path, model.state_dict())
    read_weights(tmp_path, other)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_random_streams_of_another_device_are_replaced_and_not_looked_for(tmp_path, alone):
    """A checkpoint of a CPU run has no stream of a GPU, and the other way round."""
    before = {"world_size": 1, "settings": {"gradient_accumulation_steps": 1}}
    gpu = fake_world(device="cuda:0")
    same = Settings()
    assert changes_since(before | {"device": "cpu"}, same, WORLD) == ()
    assert changes_since(before | {"device": "cpu"}, same, gpu) == ("device: cuda, was cpu",)
    assert changes_since(before | {"device": "cuda"}, same, WORLD) == ("device: cpu, was cuda",)
    whole = training()
    run(*whole, 1)
    write_training_state(*whole, WORLD, tmp_path)
    read_training_state(resume_at(tmp_path, "device: cuda, was cpu"), *training(), gpu)  # no KeyError


def test_other_accumulation_steps_draw_other_masks_and_are_announced():
    before = {"world_size": 1, "device": "cpu", "settings": {"gradient_accumulation_steps": 2}}
    assert changes_since(before, Settings(), WORLD) == ("accumulation steps: 1, was 2",)
    assert changes_since(before, Settings(gradient_accumulation_steps=2), WORLD) == ()
