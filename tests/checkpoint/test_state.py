"""A loaded training state is bitwise identical to the saved one, under any strategy and number of ranks."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.worlds import batch_plan, fake_world, process_group_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedConfig, PreTrainedModel

from app.checkpoint import state
from app.checkpoint.manager import COMPLETION_MARKER, MANIFEST
from app.checkpoint.state import TrainingState, load_weights, write_weights
from app.common.errors import UserError
from app.distributed.world import World
from app.model.dropout import seed_generators
from app.runs.schema import MODEL, RUN_STATE, SCHEDULE, SHARDS, checkpoint_files
from app.settings import Settings
from app.strategies.ddp import DDPStrategy
from app.strategies.optimization import LossScale, Optimization
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
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("temporary", torch.zeros(4), persistent=False)
        self.post_init()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.mean += x.mean()
        return self.classes(self.out(self.dropout(self.into(x)))).square().mean()


@pytest.fixture(autouse=True)
def no_exchange_of_problems(monkeypatch):
    """The other ranks of most process groups here do not exist. A problem of this rank is raised unchanged."""
    monkeypatch.setattr(state, "raise_on_all_ranks", lambda world: nullcontext())


def write_manifest(folder: Path) -> None:
    """List the files of a checkpoint, as `commit_checkpoint` does."""
    (folder / MANIFEST).write_text(json.dumps({path.name: None for path in folder.iterdir()}))


@dataclass(frozen=True)
class Training(TrainingState):
    """What a checkpoint saves, and the module whose forward and backward passes change it."""

    wrapped: nn.Module


def new_state(layout: Layout, world: World, seed: int, dtype: torch.dtype = torch.float32) -> Training:
    torch.manual_seed(seed)
    settings = Settings(strategy=layout[0], ddp_find_unused_parameters=True, precision="fp16")  # with a loss scale
    strategy = select_strategy(settings, batch_plan(layout[1]), world)
    model = Model().to(dtype)
    for buffer in (model.mean, model.temporary):
        buffer.fill_(seed)
    wrapped = strategy.wrap(model)
    parameters = list(wrapped.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = strategy.build_optimizer(groups, lr=1e-2, fused=True)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimization = Optimization(optimizer, scheduler, LossScale(settings.precision, strategy.plan, world))
    return Training(model, optimization, strategy, world, wrapped)


def train(training: Training, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        seed_generators(42, step, 0)
        x = torch.randn(4, 6)
        with training.strategy.accumulate(training.wrapped, 0):
            loss = training.wrapped(x)
            loss.backward()
        training.optimization.optimizer.step()
        training.optimization.scheduler.step()
        training.optimization.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ---- one rank: training resumes --------------------------------------------------------------------------------------

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


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
        write_manifest(tmp_path)
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


def test_the_files_contain_no_code_and_no_random_state(tmp_path):
    with process_group_of(0, 1) as world:
        training = new_state(("ddp", 1), world, seed=0)
        train(training, 0, 1)
        training.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [SCHEDULE, "state-0-of-1.safetensors"]
    contents = [path.read_bytes() for path in tmp_path.iterdir()]
    assert not any(b"\x80\x04" in content[:2] or b"pickle" in content for content in contents)
    names = load_file(tmp_path / "state-0-of-1.safetensors").keys()
    assert {name.partition(".")[0] for name in names} == {"model", "exp_avg", "exp_avg_sq", "step"}


def test_a_parameter_that_is_not_contiguous_is_saved_and_loaded(tmp_path):
    def new(seed: int) -> TrainingState:
        torch.manual_seed(seed)
        model, world = nn.Module(), fake_world()
        model.register_parameter("scale", nn.Parameter(torch.randn(3, 2).t()))
        optimizer = torch.optim.AdamW(model.parameters())
        model.scale.square().sum().backward()
        optimizer.step()
        scheduler, strategy = LambdaLR(optimizer, lambda step: 1.0), DDPStrategy(Settings(), batch_plan(), world)
        optimization = Optimization(optimizer, scheduler, LossScale("fp32", strategy.plan, world))
        return TrainingState(model, optimization, strategy, world)

    before, after = new(0), new(1)
    before.save(tmp_path)
    write_manifest(tmp_path)
    after.load(tmp_path)
    assert torch.equal(after.model.scale, before.model.scale)
    assert after.model.scale.stride() == (1, 2)
    for key, value in before.optimization.optimizer.state[before.model.scale].items():
        loaded = after.optimization.optimizer.state[after.model.scale][key]
        assert torch.equal(loaded, value)
        assert loaded.stride() == value.stride()


def test_weights_that_share_memory_are_written(tmp_path):
    model = Model()
    write_weights(tmp_path, model.state_dict())
    found = load_file(tmp_path / MODEL)
    assert found.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, found[name]), name


# ---- several ranks, one after the other ------------------------------------------------------------------------------

LAYOUTS: list[Layout] = [
    *(("ddp", 1), ("ddp", 2), ("zero1", 2), ("zero1", 5), ("zero2", 2)),
    *(("zero3", 1), ("zero3", 3), ("zero3", 4), ("zero3", 7)),
]


def name_of(layout: Layout) -> str:
    return f"{layout[0]}, {layout[1]} rank(s)"


Reference = dict[str, dict[str, torch.Tensor]]  # by kind of tensor ("model", "step", …) and name


def new_reference(dtype: torch.dtype = torch.float32) -> Reference:
    """A complete state whose values are all different."""
    model, draw = Model().to(dtype), torch.Generator().manual_seed(3)
    names = [name for name, _ in model.named_parameters()]
    with_moments = [name for name in names if not name.startswith("unused")]
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    reference = {"model": {name: torch.randn(shapes[name], dtype=dtype, generator=draw) for name in names}}
    for key in ("exp_avg", "exp_avg_sq"):
        reference[key] = {name: torch.rand(shapes[name], dtype=dtype, generator=draw) for name in with_moments}
    reference["step"] = {name: torch.tensor(float(i)) for i, name in enumerate(with_moments, start=10)}
    reference["model"] |= {"count": torch.tensor(17), "mean": torch.randn(7, dtype=dtype, generator=draw)}
    return reference


def part_of(whole: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """The rows of a parameter that a rank holds."""
    if layout[0] not in ("zero2", "zero3"):
        return whole
    chunks = whole.chunk(layout[1])
    return chunks[rank] if rank < len(chunks) else whole[:0]


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def save_on_all_ranks(folder: Path, layout: Layout, reference: Reference) -> None:
    dtype = reference["model"]["into.bias"].dtype
    for rank in reversed(range(layout[1])):
        with process_group_of(rank, layout[1]) as world, torch.no_grad():
            training = new_state(layout, world, seed=rank, dtype=dtype)
            parameters = dict(training.model.named_parameters())
            for name, parameter in parameters.items():
                local(parameter).copy_(part_of(reference["model"][name], layout, rank))
            training.model.count.fill_(reference["model"]["count"] + rank)  # every rank has buffers of its own rows
            training.model.mean.copy_(reference["model"]["mean"] + rank)
            optimizer = training.strategy.local_optimizer(training.optimization.optimizer)
            mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            for name, steps in reference["step"].items():
                if id(parameters[name]) in mine:
                    moments = {key: torch.zeros_like(parameters[name]) for key in ("exp_avg", "exp_avg_sq")}
                    for key, moment in moments.items():
                        local(moment).copy_(part_of(reference[key][name], layout, rank))
                    optimizer.state[parameters[name]] = {"step": steps.clone()} | moments
            training.optimization.scheduler.last_epoch = 4
            training.optimization.scheduler._last_lr = [0.25, 0.5]
            training.optimization.loss_scale.value.fill_(2.0**-7)
            training.optimization.loss_scale.good_steps.fill_(1234)
            training.save(folder)
    write_manifest(folder)


def check_on_all_ranks(folder: Path, layout: Layout, reference: Reference) -> None:
    dtype = reference["model"]["into.bias"].dtype
    held: list[str] = []
    for rank in range(layout[1]):
        with process_group_of(rank, layout[1]) as world:
            training = new_state(layout, world, seed=rank + 100, dtype=dtype)
            optimizer = training.strategy.local_optimizer(training.optimization.optimizer)
            for parameter in optimizer.param_groups[0]["params"]:  # nothing of what was there before must remain
                parameter.grad = torch.ones_like(parameter)
                optimizer.state[parameter] = {"step": torch.tensor(3.0)}
            training.load(folder)
            for name, parameter in training.model.named_parameters():
                assert parameter.grad is None
                assert parameter.dtype == dtype
                assert torch.equal(local(parameter), part_of(reference["model"][name], layout, rank)), name
            for name, buffer in (("count", training.model.count), ("mean", training.model.mean)):
                assert torch.equal(buffer, reference["model"][name]), name
                assert buffer.dtype == reference["model"][name].dtype
            names = {id(parameter): name for name, parameter in training.model.named_parameters()}
            for parameter, moments in optimizer.state.items():
                name = names[id(parameter)]
                held.append(name)
                assert moments.keys() == {"step", "exp_avg", "exp_avg_sq"}
                assert torch.equal(moments["step"], reference["step"][name])
                for key in ("exp_avg", "exp_avg_sq"):
                    assert moments[key].dtype == dtype
                    assert torch.equal(local(moments[key]), part_of(reference[key][name], layout, rank)), name
            assert [group["lr"] for group in training.optimization.optimizer.param_groups] == [0.25, 0.5]
            assert training.optimization.scheduler.last_epoch == 4
            loss_scale = training.optimization.loss_scale
            assert (loss_scale.value, loss_scale.good_steps) == (2.0**-7, 1234)
    copies = 1 if layout[0] == "zero1" else layout[1]
    assert sorted(held) == sorted([*reference["step"]] * copies), "each parameter has its state where it is updated"


@pytest.mark.parametrize("loaded_by", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("saved_by", LAYOUTS, ids=name_of)
def test_a_state_is_the_same_under_another_strategy_and_number_of_ranks(tmp_path, saved_by, loaded_by):
    reference = new_reference()
    save_on_all_ranks(tmp_path, saved_by, reference)
    check_on_all_ranks(tmp_path, loaded_by, reference)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(("zero3", 4), ("ddp", 1)), (("zero1", 2), ("zero3", 3))])
def test_a_state_in_fp64_is_not_rounded(tmp_path, saved_by, loaded_by):
    reference = new_reference(torch.float64)
    assert not torch.equal(reference["model"]["mean"].float().double(), reference["model"]["mean"])
    save_on_all_ranks(tmp_path, saved_by, reference)
    check_on_all_ranks(tmp_path, loaded_by, reference)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_each_value_is_in_the_file_of_one_rank_and_every_file_is_written(tmp_path, layout):
    """No rank holds more than its part, so none may write or gather more."""
    reference, (strategy, size) = new_reference(), layout
    save_on_all_ranks(tmp_path, layout, reference)
    assert {path.name for path in tmp_path.iterdir()} == {*checkpoint_files(size), MANIFEST} - {RUN_STATE}
    elements: dict[str, list[int]] = {}
    for rank in range(size):
        with safe_open(tmp_path / SHARDS.format(rank=rank, size=size), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # a file is not a dictionary
                elements.setdefault(name, [0] * size)[rank] = file.get_tensor(name).numel()
    complete = {f"{key}.{name}": value for key, tensors in reference.items() for name, value in tensors.items()}
    assert elements.keys() == complete.keys()
    for name, value in complete.items():
        is_shared = name.startswith("step.") or name in ("model.count", "model.mean")
        if strategy in ("zero2", "zero3") and not is_shared:
            assert elements[name] == [part_of(value, layout, rank).numel() for rank in range(size)]
        elif not name.startswith("step."):
            assert sum(elements[name]) == value.numel()
    if strategy == "ddp":
        assert all(sum(sizes[1:]) == 0 for sizes in elements.values()), "only rank 0 writes what every rank holds"
    if strategy == "zero1":
        owners = [[rank for rank in range(size) if elements[f"exp_avg.{name}"][rank]] for name in reference["step"]]
        assert {len(ranks) for ranks in owners} == {1}
        assert len({ranks[0] for ranks in owners}) > 1, "one rank holds the optimizer state of all parameters"


@pytest.mark.parametrize("layout", [("ddp", 1), ("zero3", 3)])
def test_weights_can_be_loaded_without_an_optimizer(tmp_path, layout):
    reference = new_reference()
    save_on_all_ranks(tmp_path, ("zero3", 4), reference)
    for rank in range(layout[1]):
        with process_group_of(rank, layout[1]) as world:
            model = new_state(layout, world, seed=1).model
            load_weights(model, tmp_path, world)
            for name, tensor in model.state_dict().items():
                whole = reference["model"][{"out.weight": "into.weight"}.get(name, name)]
                expected = whole if name in ("count", "mean") else part_of(whole, layout, rank)
                assert torch.equal(local(tensor), expected), name
            assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_schedule_is_saved_without_its_functions(tmp_path):
    with process_group_of(0, 1) as world:
        new_state(("ddp", 1), world, seed=0).save(tmp_path)
    content = json.loads((tmp_path / SCHEDULE).read_text())
    assert content.keys() == {"schedule", "loss_scale"}
    assert content["schedule"]["last_epoch"] == 0
    assert "lr_lambdas" not in content["schedule"]


# ---- what is not a checkpoint of this model ------------------------------------------------------------------------


@pytest.fixture(params=STRATEGIES)
def saved(request, tmp_path) -> Path:
    """A checkpoint of two ranks."""
    save_on_all_ranks(tmp_path, (request.param, 2), new_reference())
    (tmp_path / COMPLETION_MARKER).touch()
    return tmp_path


def load(folder: Path) -> None:
    with process_group_of(0, 1) as world:
        new_state(("ddp", 1), world, seed=1).load(folder)


def test_a_file_that_the_manifest_does_not_list_is_not_read(saved):
    shutil.copy(saved / SHARDS.format(rank=0, size=2), saved / SHARDS.format(rank=2, size=3))
    load(saved)


def test_a_checkpoint_that_another_job_removes_is_named(saved):
    (saved / COMPLETION_MARKER).unlink()  # first, as `remove` does
    load(saved)
    (saved / SHARDS.format(rank=1, size=2)).unlink()
    with pytest.raises(
        UserError, match=f"{saved.name}: cannot be read: it has been removed since this run was started"
    ):
        load(saved)
    shutil.rmtree(saved)
    with pytest.raises(UserError, match="it has been removed since this run was started"):
        load(saved)


@pytest.mark.parametrize("name", [SHARDS.format(rank=1, size=2), MANIFEST])
def test_a_damaged_file_is_a_mistake_that_names_the_checkpoint(saved, name):
    """Another node may see other contents than rank 0, which has checked all files."""
    (saved / name).write_bytes((saved / name).read_bytes()[:5])
    with pytest.raises(UserError, match=f"{saved.name}: cannot be read: (?!it has been removed).+"):
        load(saved)


def rename(folder: Path, old: str, new: str, change=lambda tensor: tensor) -> None:
    """Rename a tensor in all files of a checkpoint."""
    for path in folder.glob("state-*"):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        tensors = {new if name == old else name: tensor for name, tensor in load_file(path).items()}
        save_file({n: change(t) if n == new else t for n, t in tensors.items()}, path, metadata=metadata)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("model.into.weight", "other", r"model\.into\.weight is missing \(and 1 more differences\)"),
        ("exp_avg.into.weight", "exp_avg.other", r"exp_avg\.into\.weight is missing \(and 1 more"),
        ("step.into.weight", "step.other", r"exp_avg\.into\.weight does not belong to the model \(and 2 more"),
    ],
)
def test_a_checkpoint_of_another_model_is_rejected_before_anything_is_loaded(saved, old, new, message):
    rename(saved, old, new)
    with pytest.raises(UserError, match=f"is not a checkpoint of this model: {message}"):
        load(saved)


def test_a_tensor_of_another_shape_is_rejected(saved):
    rename(saved, "model.into.weight", "model.into.weight", lambda tensor: tensor[:, :5].contiguous())
    with pytest.raises(UserError, match=r"into\.weight has the shape \(6, 5\), not \(6, 6\)$"):
        load(saved)
