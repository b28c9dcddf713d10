"""A loaded training state is bitwise identical to the saved one, under any strategy and number of ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.worlds import batch_plan, process_group_of
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close
from transformers import PreTrainedConfig, PreTrainedModel

from app.bench.steps import Bench
from app.checkpoint.state import TrainingState
from app.common.errors import UserError
from app.distributed.world import World
from app.model.dropout import seed_generators
from app.runs.schema import SCHEDULE, SHARDS
from app.settings import Settings
from app.training.build import select_strategy

Layout = tuple[str, int]  # a strategy and a number of ranks


class ModelConfig(PreTrainedConfig):
    model_type = "state-test"


class Model(PreTrainedModel):
    """Two tied matrices, dropout, buffers, a parameter with fewer rows than ranks, and one that is not used."""

    config_class = ModelConfig

    def __init__(self) -> None:
        super().__init__(ModelConfig())
        self.into, self.out, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(3, 5)
        self.out.weight = self.into.weight
        self.classes = nn.Linear(6, 2)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(2, 7).t())  # not contiguous
        self.register_buffer("temporary", torch.zeros(4), persistent=False)
        self.post_init()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.mean += x.mean()
        return self.classes(self.out(self.dropout(self.into(x)))).square().mean()


def new_state(layout: Layout, world: World, seed: int, dtype: torch.dtype = torch.float32) -> TrainingState:
    torch.manual_seed(seed)
    flags = {"precision": "fp16", "learning_rate": 1e-2, "weight_decay": 0.1}  # fp16: with a loss scale
    settings = Settings(strategy=layout[0], ddp_find_unused_parameters=True, **flags)
    strategy = select_strategy(settings, batch_plan(layout[1]), world)
    model = Model().to(dtype)
    for buffer in (model.mean, model.temporary):
        buffer.fill_(seed)
    data = SimpleNamespace(plan=strategy.plan)
    bench = Bench(settings, world, data, strategy, model, strategy.wrap(model), loader=None)
    return TrainingState(model, bench.optimization(total_steps=20), strategy, world)


def train(training: TrainingState, steps: int) -> None:
    """Train with a single process, which needs no DDP."""
    for step in range(steps):
        seed_generators(42, step, 0)
        x = torch.randn(4, 6, dtype=training.model.mean.dtype)
        training.model(x).backward()
        training.optimization.optimizer.step()
        training.optimization.scheduler.step()
        training.optimization.optimizer.zero_grad()


@pytest.fixture
def saved(tmp_path) -> Path:
    with process_group_of(0, 1) as world:
        training = new_state(("ddp", 1), world, seed=0)
        train(training, 1)
        training.save(tmp_path)
    return tmp_path


LAYOUTS: list[Layout] = [("ddp", 1), ("ddp", 2), ("zero1", 2), ("zero1", 3), ("zero2", 2)]
LAYOUTS += [("zero3", 2), ("zero3", 4), ("zero3", 7)]  # 7 ranks are more than a parameter has rows
# Each layout is loaded from the files of each one. At the end, one file has everything.
WALK = [*(layout for pair in product(LAYOUTS, LAYOUTS) for layout in pair), ("ddp", 1)]


def test_a_state_is_the_same_after_each_pair_of_strategies_and_numbers_of_ranks(tmp_path):
    """Loading and saving send nothing, so the ranks can do it one after another."""
    with process_group_of(0, 1) as world:  # in fp64, so that a value that is rounded on the way is noticed
        training = new_state(("ddp", 1), world, seed=0, dtype=torch.float64)
        train(training, 3)
        training.optimization.loss_scale.value.fill_(2.0**-7)
        training.save(tmp_path)
    expected, schedule = load_file(tmp_path / SHARDS.format(rank=0, size=1)), (tmp_path / SCHEDULE).read_text()
    assert {name.partition(".")[0] for name in expected} == {"model", "exp_avg", "exp_avg_sq", "step"}
    assert "model.temporary" not in expected, "not part of the model's state"
    # A thread for each rank: DTensor caches the rows of a rank by its mesh, which differs between threads.
    threads = [ThreadPoolExecutor(1) for _ in range(7)]

    def load_and_save(rank: int, layout: Layout, source: Path, target: Path) -> Path:
        with process_group_of(rank, layout[1]) as world:
            state = new_state(layout, world, seed=rank + 100, dtype=torch.float64)
            state.load(source)
            return target / state.save(target)[0]

    source = tmp_path
    for number, layout in enumerate(WALK):
        folder = tmp_path / str(number)
        folder.mkdir()
        for rank in range(layout[1]):
            written = threads[rank].submit(load_and_save, rank, layout, source, folder).result()
            if layout == ("zero3", 4):  # no rank writes more than its part
                assert written.stat().st_size < 4000 + sum(tensor.nbytes for tensor in expected.values()) / 2
        assert (folder / SCHEDULE).read_text() == schedule
        source = folder
    assert_close(load_file(source / SHARDS.format(rank=0, size=1)), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", [SHARDS.format(rank=0, size=1), SCHEDULE])
@pytest.mark.parametrize("size", [0, 5])
def test_a_damaged_file_is_a_mistake_that_names_the_checkpoint(saved, name, size):
    """Another node may see other contents than rank 0, which has checked all files."""
    (saved / name).write_bytes((saved / name).read_bytes()[:size])
    with process_group_of(0, 1) as world, pytest.raises(UserError, match=f"{saved.name}: .+"):
        new_state(("zero3", 1), world, seed=1).load(saved)


@pytest.mark.parametrize(("name", "layer"), [("other", nn.Linear(6, 2, False)), ("classes", nn.Linear(5, 2, False))])
def test_a_checkpoint_of_a_model_with_another_name_or_shape_is_rejected(saved, name, layer):
    with process_group_of(0, 1) as world:
        state = new_state(("ddp", 1), world, seed=1)
        state.model.add_module(name, layer)
        with pytest.raises(UserError, match=f"is not a checkpoint of this model: .*{name}.weight"):
            state.load(saved)
