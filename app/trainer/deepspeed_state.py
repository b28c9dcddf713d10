"""Save and load the training state of DeepSpeed in the same files as the other strategies.

DeepSpeed's own checkpoints are pickle files, which it loads with `weights_only=False`, and they hold flattened parts of
parameter groups. Here every tensor is gathered under its own name, so a run can resume with another number of ranks,
another ZeRO stage, or another strategy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..checkpoint.state import ShardReader, TrainingState
from ..strategies.vector_tails import MOMENTS
from .deepspeed_engine import gather_parameters


@dataclass(frozen=True)
class DeepSpeedState(TrainingState):
    """The objects whose state a checkpoint saves and restores, with DeepSpeed's engine."""

    engine: Any

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Gather weights and moments, one tensor after another. Only rank 0 keeps and writes them."""
        tensors = {}
        for name, tensor in self._gathered():
            if self.world.is_main_process:
                tensors[name] = tensor.detach().to("cpu", copy=True)
        return tensors

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link_moments()
        states = self.optimization.optimizer.state.values()
        (steps, *_) = [state["step"] for state in states]  # the same for all parameters
        for name, parameter in self.model.named_parameters():
            with gather_parameters([parameter]):
                yield f"model.{name}", parameter
            if parameter.requires_grad:
                for key in MOMENTS:
                    yield f"{key}.{name}", safe_get_full_optimizer_state(parameter, key)
                yield f"step.{name}", steps
        saved = self.model.state_dict(keep_vars=True).keys()
        yield from ((f"model.{name}", buffer) for name, buffer in self.model.named_buffers() if name in saved)

    def _restore(self, shards: ShardReader) -> None:
        """Restore AdamW's state. The weights were loaded before the engine was created from them."""
        # Without DeepSpeed, a parameter that has had no gradient has no state; here its moments stay zero.
        trained = [(name, p) for name, p in self.model.named_parameters() if f"step.{name}" in shards]
        self._allocate_moments(shards.read_replicated(f"step.{trained[0][0]}"))
        for name, parameter in trained:
            for key in MOMENTS:
                value = shards.read(f"{key}.{name}", parameter)  # all rows, which other strategies have sharded
                self._set_moment(parameter, value.to(self.world.device), key)

    def _set_moment(self, parameter: torch.nn.Parameter, value: torch.Tensor, key: str) -> None:
        """Write a complete moment into the parts that this rank holds."""
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if not hasattr(parameter, "ds_tensor"):  # stages 1 and 2
            safe_set_full_optimizer_state(parameter, value, key)
            return
        # Stage 3 pads a parameter whose elements cannot be divided among the ranks; DeepSpeed's own function for
        # complete tensors does not.
        size = parameter.ds_tensor.numel()
        padded = torch.nn.functional.pad(value.flatten(), (0, size * self.world.size - value.numel()))
        safe_set_local_optimizer_state(parameter, padded[size * self.world.rank :][:size], key)

    def _allocate_moments(self, steps: torch.Tensor) -> None:
        """Create AdamW's state of this rank's parts, which otherwise exists only after the first step."""
        zero = self.engine.optimizer
        stage = self.engine.zero_optimization_stage()
        parts = zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
        for part in parts:
            moments = {key: torch.zeros_like(part, requires_grad=False) for key in MOMENTS}
            # AdamW increments the number of steps in place, so each part needs its own.
            self.optimization.optimizer.state[part] = {"step": steps.clone().to(part.device)} | moments
        self._link_moments()

    def _link_moments(self) -> None:
        """Let DeepSpeed find the moments of each parameter in the flattened parts.

        Stages 1 and 2 do this after the very first update of a parameter group, when the other groups have no moments.
        """
        if self.engine.zero_optimization_stage() < 3:
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()
