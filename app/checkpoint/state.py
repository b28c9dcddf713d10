"""Save and load the training state in files that cannot contain code: safetensors and JSON.

A checkpoint holds everything that the next step depends on: weights, optimizer, schedule and loss scale. Each rank
writes the part that only it holds into a shard file of its own, so sharded state is never gathered. A run can resume
under another strategy and world size, where each rank reads the rows that it needs from these files.

The tensors in a shard file are named after the parameter or buffer that they belong to:

    model.<name>                            the weight or buffer
    exp_avg.<name>, exp_avg_sq.<name>       AdamW's moments of a parameter that has had a gradient
    step.<name>                             the number of its updates
    unused_rows.<name>                      the rows of an embedding matrix that are not trained (model/vocabulary.py)
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..common.errors import UserError
from ..common.files import flush
from ..distributed.collectives import raise_on_all_ranks
from ..distributed.world import World
from ..model.vocabulary import trimmed_vocabulary
from ..runs.schema import MODEL, SCHEDULE, SHARDS
from ..strategies.base import Strategy, local_part, rows_of
from ..strategies.optimization import MOMENTS, Optimization
from .manager import COMPLETION_MARKER, MANIFEST

UNUSED_ROWS = "unused_rows."
FIRST_ROWS = "first_rows"  # the metadata entry of a shard file: the first row of each tensor that is not complete


@dataclass(frozen=True)
class TrainingState:
    """The objects whose state a checkpoint saves and restores."""

    model: torch.nn.Module
    optimization: Optimization
    strategy: Strategy
    world: World

    def save(self, folder: Path) -> None:
        """Write this rank's part of the state into a folder that all ranks share. Collective."""
        tensors = self._tensors()
        # The row at which this rank's part of each sharded tensor begins.
        first_rows = {name: start for name, tensor in tensors.items() if (start := rows_of(tensor)[0]) is not None}
        parts = {name: _for_file(local_part(tensor)) for name, tensor in tensors.items()}
        vocabulary = trimmed_vocabulary(self.model)
        if vocabulary is not None and vocabulary.rows is not None:
            parts[UNUSED_ROWS + vocabulary.names[0]] = vocabulary.rows
        file = folder / SHARDS.format(rank=self.world.rank, size=self.world.size)
        save_file(parts, file, metadata={FIRST_ROWS: json.dumps(first_rows)})
        flush(file)
        if self.world.is_main_process:
            # lr_lambdas are functions, which follow from the settings.
            state = self.optimization.scheduler.state_dict()
            schedule = {name: value for name, value in state.items() if name != "lr_lambdas"}
            content = {"schedule": schedule, "loss_scale": self.optimization.loss_scale.state_dict()}
            (folder / SCHEDULE).write_text(json.dumps(content), encoding="utf-8")

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Restore the state from a checkpoint that was written under any strategy and world size. Collective.

        Raises:
            AgreedError: the checkpoint has been removed, or it is not one of this model.
        """
        with open_checkpoint(folder, self.model, self.world) as shards:
            self._restore(shards)
        optimizer, scheduler = self.optimization.optimizer, self.optimization.scheduler
        optimizer.zero_grad()
        lambdas = scheduler.state_dict().get("lr_lambdas")
        scheduler.load_state_dict(shards.schedule["schedule"] | {"lr_lambdas": lambdas})
        self.optimization.loss_scale.load_state_dict(shards.schedule["loss_scale"])
        for group, learning_rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = learning_rate

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that this rank writes: weights, and the state of AdamW."""
        tensors = {}
        for name, tensor in _weights(self.model):
            if self.world.is_main_process or rows_of(tensor)[0] is not None:  # rank 0 writes what every rank holds
                tensors[f"model.{name}"] = tensor
        if self.world.is_main_process or self.strategy.shards_optimizer:
            state = self.strategy.local_optimizer(self.optimization.optimizer).state
            for name, parameter in self.model.named_parameters():
                tensors |= {f"{key}.{name}": value for key, value in state.get(parameter, {}).items()}
        return tensors

    def _restore(self, shards: ShardReader) -> None:
        """Copy the tensors of a checkpoint into the model and the optimizer."""
        _copy_weights(shards, self.model)
        optimizer = self.strategy.local_optimizer(self.optimization.optimizer)
        optimized = {parameter for group in optimizer.param_groups for parameter in group["params"]}  # by this rank
        optimizer.state.clear()
        for name, parameter in self.model.named_parameters():
            if parameter in optimized and f"step.{name}" in shards:  # a parameter that has had a gradient
                moments = {key: torch.zeros_like(parameter) for key in MOMENTS}
                for key, moment in moments.items():
                    shards.copy_into(moment, f"{key}.{name}")
                steps = shards.read_replicated(f"step.{name}").to(local_part(parameter).device)
                optimizer.state[parameter] = {"step": steps} | moments


@torch.no_grad()
def load_weights(model: torch.nn.Module, folder: Path, world: World) -> None:
    """Restore only the weights of a checkpoint, with the same errors as `TrainingState.load`. Collective."""
    with open_checkpoint(folder, model, world) as shards:
        _copy_weights(shards, model)


@contextmanager
def open_checkpoint(folder: Path, model: torch.nn.Module, world: World) -> Iterator[ShardReader]:
    """Open all files of a checkpoint, and check that they hold the model's tensors. Collective.

    The folder may be another run's, which removes old checkpoints. Once the files are open, that does no harm.

    Raises:
        AgreedError: a file is missing or damaged, or the checkpoint is not one of this model.
    """
    with ExitStack() as open_files:
        with raise_on_all_ranks(world):
            shards = ShardReader()
            shards.open(folder, open_files)
            if differences := shards.differences(model):
                more = f" (and {len(differences) - 1} more differences)" if differences[1:] else ""
                raise UserError(f"{folder}: is not a checkpoint of this model: {differences[0]}{more}")
        yield shards


def unreadable(checkpoint: Path, problem: Exception) -> UserError:
    """Return the error for a checkpoint, verified before, of which a file cannot be read any more."""
    is_removed = not (checkpoint / COMPLETION_MARKER).exists()
    reason = "it has been removed since this run was started" if is_removed else problem
    return UserError(f"{checkpoint}: cannot be read: {reason}")


class ShardReader:
    """The tensors of a checkpoint, whose rows are distributed over the files of several ranks."""

    def __init__(self) -> None:
        self.parts: dict[str, list[tuple[int, Any]]] = {}  # of each tensor: the first row in a file, and the file
        self.schedule: dict[str, Any] = {}  # the content of schedule.json

    def open(self, folder: Path, open_files: ExitStack) -> None:
        """Open the files that the manifest lists; others do not belong to the checkpoint."""
        try:
            names = json.loads((folder / MANIFEST).read_bytes())
            for name in sorted(fnmatch.filter(names, SHARDS.format(rank="*", size="*"))):
                file = open_files.enter_context(safe_open(folder / name, framework="pt"))
                first_rows = json.loads(file.metadata()[FIRST_ROWS])
                for tensor in file.keys():  # noqa: SIM118  # a file is not a dictionary
                    self.parts.setdefault(tensor, []).append((first_rows.get(tensor, 0), file))
            self.schedule = json.loads((folder / SCHEDULE).read_bytes())
        except (OSError, ValueError, SafetensorError) as problem:
            raise unreadable(folder, problem) from None
        for parts in self.parts.values():
            parts.sort(key=lambda part: part[0])

    def differences(self, model: torch.nn.Module) -> list[str]:
        """List the tensors that are missing, do not belong to the model, or have another shape."""
        shapes = {name: tuple(tensor.shape) for name, tensor in _weights(model)}
        required = [f"model.{name}" for name in shapes]
        # A parameter that has had no gradient has no optimizer state.
        required += [f"{key}.{name}" for name in shapes if f"step.{name}" in self for key in (*MOMENTS, "step")]
        present = [name for name in self.parts if not name.startswith(UNUSED_ROWS)]
        return [
            *(f"{name} is missing" for name in required if name not in self),
            *(f"{name} does not belong to the model" for name in sorted(set(present) - set(required))),
            *(
                f"{name} has the shape {self._shape(f'model.{name}')}, not {shape}"
                for name, shape in shapes.items()
                if f"model.{name}" in self and self._shape(f"model.{name}") != shape
            ),
        ]

    def _shape(self, name: str) -> tuple[int, ...]:
        shapes = [file.get_slice(name).get_shape() for _, file in self.parts[name]]
        return tuple(shapes[0]) if len(shapes) == 1 else (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def __contains__(self, name: str) -> bool:
        return name in self.parts

    def copy_into(self, tensor: torch.Tensor, name: str) -> None:
        """Copy a tensor of the checkpoint, or this rank's shard of it."""
        local_part(tensor).copy_(self.read(name, tensor))

    def read(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a tensor that is sharded as `like` is, on the CPU."""
        start, length = rows_of(like)
        if start is None:
            parts = [file.get_tensor(name) for _, file in self.parts[name]]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        rows = [torch.empty_like(local_part(like), device="cpu")[:0]]
        for first, file in self.parts[name]:
            part = file.get_slice(name)
            begin, end = max(0, start - first), min(part.get_shape()[0], start + length - first)
            if begin < end:
                rows.append(part[begin:end])
        return torch.cat(rows)

    def read_replicated(self, name: str) -> torch.Tensor:
        """Return a tensor that is complete in each file that holds it."""
        _, file = self.parts[name][0]
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def write_weights(folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Write a complete state dict, parameters and buffers, as model.safetensors."""
    parts, memory = {}, set()
    for name, tensor in state.items():
        part = _for_file(tensor)
        parts[name] = part.clone() if part.data_ptr() in memory else part  # safetensors refuses tied weights
        memory.add(part.data_ptr())
    save_file(parts, folder / MODEL)


@torch.no_grad()
def load_complete_weights(folder: Path, model: torch.nn.Module) -> None:
    """Load model.safetensors into the model, or into the shards of it that this rank holds."""
    with safe_open(folder / MODEL, framework="pt") as file:
        weights = ShardReader()
        weights.parts = {name: [(0, file)] for name in file.keys()}  # noqa: SIM118  # a file is not a dictionary
        vocabulary = trimmed_vocabulary(model)
        for name, tensor in model.state_dict().items():
            if vocabulary is None or name not in vocabulary.names:
                weights.copy_into(tensor, name)
                continue
            matrix = file.get_tensor(name)
            start, length = rows_of(tensor)
            used = vocabulary.used if start is None else vocabulary.used[start : start + length]
            local_part(tensor).copy_(matrix[used])
            if vocabulary.rows is not None:
                vocabulary.rows.copy_(matrix[vocabulary.unused])


def _copy_weights(shards: ShardReader, model: torch.nn.Module) -> None:
    for name, tensor in _weights(model):
        shards.copy_into(tensor, f"model.{name}")
    vocabulary = trimmed_vocabulary(model)
    if vocabulary is not None and vocabulary.rows is not None:
        vocabulary.rows.copy_(shards.read_replicated(UNUSED_ROWS + vocabulary.names[0]))


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and the buffers that belong to the model's state, without repeating tied ones."""
    saved = model.state_dict(keep_vars=True).keys()
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def _for_file(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that safetensors can write: on the CPU and contiguous. Copies it only if necessary."""
    return tensor.detach().cpu().contiguous()
