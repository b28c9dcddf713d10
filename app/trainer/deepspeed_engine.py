"""DeepSpeed's ZeRO (Rajbhandari et al. 2020) as the engine of the Trainer path.

Trainer creates the engine itself, through accelerate. The engine averages and clips the gradients and runs the
optimizer as part of the last backward pass of a step, so there is little to do here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ..checkpoint.state import ShardReader, TrainingState
from ..data.sampler import BatchPlan
from ..distributed.world import World
from ..settings import Settings
from ..strategies.base import GradientCheck, PlainAdamW, Tensors
from ..strategies.optimization import MOMENTS


class DeepSpeed(PlainAdamW):
    """A `deepspeed.DeepSpeedEngine`. Implements `Strategy`.

    DeepSpeed flattens the parameters of a group into one tensor and gives each rank an equal part of it, so gradients
    are added in another order than with the other strategies, and results differ by rounding.
    """

    name: str = "deepspeed"
    shards_optimizer = False  # checkpoints are gathered, because no other strategy could read flattened parts

    def __init__(self, settings: Settings, plan: BatchPlan, world: World) -> None:
        self.world = world
        self.check_gradients = GradientCheck(settings.ddp_find_unused_parameters)
        self.reached: set[str] = set()  # the parameters that have had a gradient
        self.hooks: list[RemovableHandle] = []
        self.plan = plan
        self.logical_ranks: Sequence[int] = plan.logical_ranks_of(world.rank)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model itself: Trainer creates the engine when training begins, after `place`."""
        self.model = model
        return model

    def place(self, config: Mapping[str, Any]) -> None:
        """Place the model on the device, or with stage 3 only this rank's shards of its parameters. Collective.

        The engine would place all of it there before it shards it with stage 3, too. Call this right before the engine
        is created, with its configuration: a complete model is needed to load weights and to group parameters by shape.
        """
        import deepspeed.ops
        from deepspeed.runtime import torch_autocast

        warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+. is deprecated", FutureWarning)
        # DeepSpeed would compile an operation for inference on CPUs, which needs a C++ compiler and half a minute.
        deepspeed.ops.__compatible_ops__ = {}
        torch_autocast.TORCH_AUTOCAST_INITIALIZED = False  # an earlier run of this process may have set it
        if config["zero_optimization"]["stage"] == 3:
            # The configuration is checked against the number of ranks of DeepSpeed's own backend.
            deepspeed.init_distributed(deepspeed.accelerator.get_accelerator().communication_backend_name())
            # The same call as the engine's, which leaves sharded models alone. It moves one parameter at a time, and no
            # buffer. A parameter stays the same object, so tied ones stay tied, and the optimizer keeps it.
            deepspeed.zero.Init(module=self.model, config_dict_or_path=config, dtype=torch.float32)
            move_buffers(self.model, self.world.device)
        else:
            self.model.to(self.world.device)
        if self.check_gradients.is_due:
            # The engine moves gradients to buffers of its own as soon as they are computed.
            self.hooks = [
                p.register_post_accumulate_grad_hook(partial(self._note, name))
                for name, p in self.model.named_parameters()
                if p.requires_grad
            ]

    def _note(self, name: str, parameter: torch.Tensor) -> None:
        self.reached.add(name)

    def accumulate(self, wrapped: torch.nn.Module, number: int) -> AbstractContextManager[Any]:
        """Return an empty context: Trainer tells the engine which micro-batch is the last one of a step."""
        return nullcontext()

    def clip_grad_norm(self, wrapped: torch.nn.Module, max_norm: float, loss_scale: torch.Tensor) -> torch.Tensor:
        """Return the norm by which the engine has clipped the gradients of this step.

        It is infinite if it was not finite, and the engine has skipped the step in that case.
        """
        self.check_gradients(self.model, self.reached)
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        norm = wrapped.get_global_grad_norm()  # type: ignore[operator]
        # A tensor on the device, or after an overflow a Python float.
        return torch.as_tensor(norm, dtype=torch.float32, device=self.world.device)

    def gather_model_state(self, model: torch.nn.Module) -> Tensors:
        """Gather one parameter after another, so that only rank 0 holds the complete state dict, on the CPU."""
        state: Tensors = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            with gather_parameters([tensor]):
                if self.world.is_main_process:
                    state[name] = tensor.detach().to("cpu", copy=True)
        return state


def move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Move the buffers of a model to a device. A buffer that several modules share stays shared."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = moved.setdefault(buffer, buffer.to(device))


def gather_parameters(tensors: Iterable[torch.Tensor], write: bool = False) -> AbstractContextManager[Any]:
    """Return a context in which parameters that ZeRO-3 has sharded are complete on every rank. Collective.

    With `write`, rank 0's changes to them are kept.
    """
    sharded = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
    if not sharded:
        return nullcontext()
    import deepspeed

    modifier_rank = 0 if write else None
    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(sharded, modifier_rank=modifier_rank)
    return context


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

        if not any(self.optimization.optimizer.state.values()):  # all steps so far were skipped
            self._allocate_moments(torch.zeros(()))
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
        if not trained:  # all steps so far were skipped
            return
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
