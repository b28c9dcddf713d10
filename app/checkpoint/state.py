"""Save and load the training state in files that can't contain code: safetensors and JSON.

A checkpoint holds everything that the next step depends on: weights, optimizer, schedule, and the random number
generators of all ranks. It is complete in itself, so it can be resumed under another strategy and world size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import LRScheduler
from transformers import set_seed

from app.checkpoint.random_state import get_random_state, set_random_state
from app.distributed.collectives import all_gather_object
from app.distributed.world import World
from app.runs.resume import Resume
from app.runs.schema import MODEL, OPTIMIZER, RANDOM, SCHEDULE
from app.strategies.base import Strategy, Tensors


@dataclass(frozen=True)
class TrainingState:
    """The objects whose state a checkpoint saves and restores."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    strategy: Strategy
    world: World

    def save(self, folder: Path) -> None:
        """Write the state of all ranks into a folder. Collective; rank 0 writes."""
        # Gather everything before writing: if rank 0 failed between two collectives, the others would wait forever.
        weights = self.strategy.gather_model_state(self.model)
        optimizer = self.strategy.gather_optimizer_state(self.optimizer)
        random_states = all_gather_object(
            {name: value.numpy() for name, value in get_random_state(self.world).items()}, self.world
        )
        if not self.world.is_main_process:
            return
        write_weights(folder, weights)
        moments = {f"{i}.{name}": value for i, values in optimizer["state"].items() for name, value in values.items()}
        save_file(_unshared(moments), folder / OPTIMIZER)
        by_rank = {
            f"{rank}.{name}": torch.from_numpy(value)
            for rank, state in enumerate(random_states)
            for name, value in state.items()
        }
        save_file(by_rank, folder / RANDOM)
        # lr_lambdas are functions, which follow from the settings.
        schedule = {name: value for name, value in self.scheduler.state_dict().items() if name != "lr_lambdas"}
        content = {"param_groups": optimizer["param_groups"], "schedule": schedule}
        (folder / SCHEDULE).write_text(json.dumps(content), encoding="utf-8")

    def load(self, resume: Resume) -> None:
        """Restore the state from `resume.checkpoint`. Collective.

        If the saved random states do not apply, as at another world size (`Resume.changes`), every rank is seeded
        again, with a seed that differs from the initial one so that dropout masks do not repeat.
        """
        folder = resume.checkpoint
        assert folder is not None
        self.strategy.load_model_state(self.model, read_weights(folder))
        content = json.loads((folder / SCHEDULE).read_text(encoding="utf-8"))
        moments: dict[int, Tensors] = {}
        for key, value in load_file(folder / OPTIMIZER).items():
            index, _, name = key.partition(".")
            moments.setdefault(int(index), {})[name] = value
        self.strategy.load_optimizer_state(self.optimizer, {"state": moments, "param_groups": content["param_groups"]})
        self.optimizer.zero_grad()
        lambdas = self.scheduler.state_dict().get("lr_lambdas")
        self.scheduler.load_state_dict(content["schedule"] | {"lr_lambdas": lambdas})
        if resume.changes:
            set_seed(resume.new_seed + self.world.rank)
            return
        prefix = f"{self.world.rank}."
        states = load_file(folder / RANDOM)
        mine = {name.removeprefix(prefix): x for name, x in states.items() if name.startswith(prefix)}
        set_random_state(mine, self.world)


def write_weights(folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Write a complete state dict, parameters and buffers, as model.safetensors."""
    save_file(_unshared(state), folder / MODEL)


def read_weights(folder: Path) -> Tensors:
    """Read what `write_weights` wrote."""
    return load_file(folder / MODEL)


def _unshared(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return contiguous CPU copies: safetensors refuses tensors that share memory, such as tied weights."""
    seen: set[int] = set()
    copies = {}
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        copies[name] = copy.clone() if copy.data_ptr() in seen else copy
        seen.add(copy.data_ptr())
    return copies
