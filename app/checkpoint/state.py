"""Save and load the training state in safetensors files, which cannot contain code, and in JSON.

A checkpoint holds everything that the next step depends on: weights, optimizer, schedule and loss scale. Each rank
writes what only it holds into a file of its own, so sharded state is never gathered. A run can resume under another
strategy and world size: torch.distributed.checkpoint then reads the rows that each rank needs. The tensors are named

    model.<name>                            the weight or buffer
    exp_avg.<name>, exp_avg_sq.<name>       AdamW's moments of a parameter that has had a gradient
    step.<name>                             the number of its updates
    unused_rows.<name>                      the rows of an embedding matrix that are not trained (model/vocabulary.py)
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp

from ..common.errors import UserError
from ..distributed.collectives import raise_on_all_ranks, saved_buffers
from ..distributed.world import World
from ..model.vocabulary import trimmed_vocabulary
from ..runs.schema import SCHEDULE, SHARDS
from ..strategies.base import Strategy, Tensors, local_part, rows_of
from ..strategies.optimization import MOMENTS, Optimization

WEIGHT = "model."
UNUSED_ROWS = "unused_rows."


@dataclass(frozen=True)
class TrainingState:
    """The objects whose state a checkpoint saves and restores."""

    model: torch.nn.Module
    optimization: Optimization
    strategy: Strategy
    world: World

    # ---- save ------------------------------------------------------------------------------------------------------

    def save(self, folder: Path, weights_only: bool = False) -> list[str]:
        """Write this rank's part of the state into a folder that all ranks share, and return the files' names.

        Collective.
        """
        tensors = {
            name: tensor.detach()
            for name, tensor in (self._weights() if weights_only else self._tensors()).items()
            if self._writes(name, tensor)
        }
        file = SHARDS.format(rank=self.world.rank, size=self.world.size)
        save_shard(folder / file, tensors)
        if weights_only or not self.world.is_main_process:
            return [file]
        # lr_lambdas are functions, which follow from the settings.
        state = self.optimization.scheduler.state_dict()
        schedule = {name: value for name, value in state.items() if name != "lr_lambdas"}
        content = {"schedule": schedule, "loss_scale": self.optimization.loss_scale.state_dict()}
        (folder / SCHEDULE).write_text(json.dumps(content), encoding="utf-8")
        return [file, SCHEDULE]

    def _writes(self, name: str, tensor: torch.Tensor) -> bool:
        """Tell whether this rank writes a tensor: rank 0 writes what every rank holds."""
        is_only_here = self.strategy.shards_optimizer and not name.startswith((WEIGHT, UNUSED_ROWS))
        return self.world.is_main_process or is_only_here or rows_of(tensor)[0] is not None

    # ---- load ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, folder: Path, weights_only: bool = False) -> None:
        """Restore the state from a checkpoint that was written under any strategy and world size. Collective.

        Raises:
            AgreedError: the checkpoint cannot be read, or it is not one of this model.
        """
        with raise_on_all_ranks(self.world):
            if not folder.is_dir():  # by its own run, if this is another one
                raise UserError(f"{folder}: has been removed since this run was started")
            try:
                if weights_only:
                    load_tensors(folder, self._weights())
                else:
                    self._load(folder)
            except CheckpointException as failure:
                problem = next(iter(failure.failures.values()))[0]
                raise UserError(f"{folder}: is not a checkpoint of this model: {problem}") from None
            except (SafetensorError, OSError, ValueError, KeyError) as problem:
                raise UserError(f"{folder}: cannot be read: {problem}") from None

    def _load(self, folder: Path) -> None:
        optimizer, scheduler = self.optimization.optimizer, self.optimization.scheduler
        saved = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        local = self.strategy.local_optimizer(optimizer)
        updated = {parameter for group in local.param_groups for parameter in group["params"]}  # by this rank
        local.state.clear()
        for name, parameter in self.model.named_parameters():
            if parameter in updated and f"step.{name}" in saved:  # a parameter that has had a gradient
                moments = {key: torch.zeros_like(parameter) for key in MOMENTS}
                local.state[parameter] = {"step": torch.zeros((), device=local_part(parameter).device)} | moments
        load_tensors(folder, self._tensors())
        optimizer.zero_grad()
        state = json.loads((folder / SCHEDULE).read_bytes())
        lambdas = scheduler.state_dict().get("lr_lambdas")
        scheduler.load_state_dict(state["schedule"] | {"lr_lambdas": lambdas})
        self.optimization.loss_scale.load_state_dict(state["loss_scale"])
        for group, learning_rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = learning_rate

    # ---- names -----------------------------------------------------------------------------------------------------

    def _weights(self) -> Tensors:
        """Return parameters, each once, the buffers of the model's state, and the rows that are not trained."""
        # The buffers first: they are found by the model's state dict, for which FSDP reshards the parameters.
        buffers, vocabulary = saved_buffers(self.model).items(), trimmed_vocabulary(self.model)
        tensors = {f"{WEIGHT}{name}": tensor for name, tensor in (*self.model.named_parameters(), *buffers)}
        if vocabulary is not None and vocabulary.rows is not None:
            tensors[UNUSED_ROWS + vocabulary.names[0]] = vocabulary.rows
        return tensors

    def _tensors(self) -> Tensors:
        """Return the weights and this rank's part of AdamW's state."""
        tensors, state = self._weights(), self.strategy.local_optimizer(self.optimization.optimizer).state
        for name, parameter in self.model.named_parameters():
            tensors |= {f"{key}.{name}": value for key, value in state.get(parameter, {}).items()}
        return tensors


def save_shard(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write this rank's parts of some tensors in the format that `HuggingFaceStorageReader` reads.

    The writer of torch.distributed.checkpoint would keep a second copy of all tensors in memory.
    """
    parts = {name: local_part(tensor).cpu().contiguous() for name, tensor in tensors.items()}
    # Tensors are sharded by rows: a part begins at a row, and at 0 in all other dimensions.
    offsets = {
        name: {"saved_offsets": [rows_of(tensor)[0] or 0, *[0] * tensor.ndim][: tensor.ndim]}
        for name, tensor in tensors.items()
    }
    save_file(parts, file, {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"})


def load_tensors(folder: Path, tensors: Tensors) -> None:
    """Copy the rows that this rank needs from the files in a folder into tensors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each rank reads on its own
        load_with_dcp(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
