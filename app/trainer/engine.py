"""Trainer's engines, DeepSpeed (`--deepspeed`) and FSDP2 (`--fsdp`), which replace the strategy, and its arguments.

`--fsdp` is like `--strategy zero3`, but the model is sharded by accelerate. It has not been run on GPUs. The tests run
it on CPUs that accelerate is made to treat as GPUs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ..common.errors import UserError
from ..data.sampler import BatchPlan
from ..distributed.collectives import broadcast_object, raise_on_all_ranks
from ..distributed.environment import unset_engine_variables
from ..distributed.world import World
from ..settings import Settings
from ..strategies.base import Strategy, transformer_blocks
from ..strategies.fsdp import FullyShardStrategy
from ..training.prepare import Preparation
from .deepspeed_config import Config, changes_of_config, complete_config, parse
from .deepspeed_engine import DeepSpeed

INSTALLATION = (
    "bash run_scripts/setup.sh --deepspeed, or DS_BUILD_OPS=0 pip install --no-build-isolation -e '.[deepspeed]'"
)


class TrainerEngine:
    """Implements `app.training.prepare.Engine`. With `--fsdp`, `config` is None."""

    def __init__(self) -> None:
        self.config: Config | None = None

    def check(self, settings: Settings, world: World) -> None:
        if settings.fsdp and world.device.type == "cpu":
            raise UserError("--fsdp needs GPUs: on CPUs Trainer would train with plain DDP; use --strategy zero3")
        if settings.deepspeed is not None and importlib.util.find_spec("deepspeed") is None:
            raise UserError(f"--deepspeed: DeepSpeed is not installed: run {INSTALLATION}")

    def read_config(self, settings: Settings, world: World) -> None:
        if settings.deepspeed is None:
            return
        config: Config = {}
        with raise_on_all_ranks(world):
            if world.is_main_process:  # the other nodes need not have the file
                config = parse(Path(settings.deepspeed))
        self.config = broadcast_object(config, world)

    def complete_config(self, settings: Settings, plan: BatchPlan, state: Mapping[str, Any]) -> tuple[str, ...]:
        if self.config is None:
            return ()
        self.config = complete_config(self.config, settings, plan)
        return changes_of_config(state, self.config)

    def select_strategy(self, settings: Settings, plan: BatchPlan, world: World) -> Strategy:
        return (DeepSpeed if settings.deepspeed is not None else TrainerFSDP)(settings, plan, world)


class TrainerFSDP(FullyShardStrategy):
    """A model that accelerate shards when training begins. Implements `Strategy`.

    NCCL reduces gradients in its own order, so results differ from the other strategies by rounding.
    """

    def __init__(self, settings: Settings, plan: BatchPlan, world: World) -> None:
        super().__init__(settings, plan, world)
        self.name = "fsdp"

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:  # type: ignore[override]
        """Return the model itself: Trainer shards it when training begins."""
        return model

    def accumulate(self, wrapped: torch.nn.Module, number: int) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Return an empty context: Trainer turns off the exchange of gradients until the last micro-batch of a step."""
        return nullcontext()

    def clip_grad_norm(self, wrapped: torch.nn.Module, max_norm: float, loss_scale: torch.Tensor) -> torch.Tensor:
        """Clip by the norm of all shards together. Collective."""
        self.check_gradients(wrapped)
        self.parameters = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
        return super().clip_grad_norm(wrapped, max_norm, loss_scale)


def fsdp_config(model: PreTrainedModel) -> dict[str, Any]:
    """Return Trainer's configuration of FSDP2, which shards the same blocks as `--strategy zero3`.

    Blocks that contain the input embeddings, such as BertEmbeddings, are left out: accelerate shards the embeddings
    themselves, and fails if that has been done already.
    """
    embeddings = model.get_input_embeddings()
    blocks = [block for block in transformer_blocks(model) if all(part is not embeddings for part in block.modules())]
    names = sorted({type(block).__name__ for block in blocks})
    policy = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": names}
    return {"version": 2, "reshard_after_forward": True} | (policy if names else {"auto_wrap_policy": "NO_WRAP"})


class TrainingArgumentsWithoutPlacement(TrainingArguments):
    """Trainer's arguments, except that the strategy places the model on the device."""

    @property
    def place_model_on_device(self) -> bool:
        """Trainer would place the complete model there, before the strategy shards it."""
        return False


def training_arguments(prepared: Preparation, world: World) -> TrainingArguments:
    settings, plan, on_cpu = prepared.settings, prepared.plan, world.device.type == "cpu"
    return TrainingArgumentsWithoutPlacement(
        output_dir=str(prepared.record.folder),
        per_device_train_batch_size=plan.micro_size,
        per_device_eval_batch_size=settings.eval_batch_size,
        gradient_accumulation_steps=plan.micro_batches_per_step,
        num_train_epochs=settings.num_train_epochs,
        max_steps=plan.total_steps,
        max_grad_norm=settings.max_grad_norm or float("inf"),
        seed=settings.seed,
        eval_strategy="no",  # the record decides on both, so that they follow the same steps as in app.ddp_loop
        save_strategy="no",
        logging_strategy="no",  # the record keeps every step's loss; Trainer's log would gather it again
        logging_nan_inf_filter=False,  # it would hide a non-finite loss, and synchronize with the device in each step
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu else "nccl",
        ddp_timeout=settings.ddp_timeout,
        disable_tqdm=True,  # the record shows the progress bar
        label_names=["labels"],  # by default every argument of the model's forward that has "label" in its name
        report_to="none",
        deepspeed=prepared.deepspeed_config,
        fsdp=True if settings.fsdp else None,  # type: ignore[arg-type]
        fsdp_config=fsdp_config(prepared.model) if settings.fsdp else None,
    )


def unset_engine() -> None:
    """Undo the arguments' changes to this process: later models and Trainers would use DeepSpeed or FSDP too.

    Call it when Trainer has been created.
    """
    unset_hf_deepspeed_config()  # with stage 3, from_pretrained would shard the next model
    unset_engine_variables()
