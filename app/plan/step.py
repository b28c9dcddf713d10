"""The plan of a training step on each rank: predicted from the model's config, without weights and without ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from transformers import PretrainedConfig, PreTrainedModel

from ..common.formats import MIB
from ..data.batches import BatchPlan
from ..data.tokenize import occurring_tokens, tokenize
from ..distributed.world import Topology
from ..model.hub import resolve_commit
from ..model.load import classifier_config, load_tokenizer
from ..model.vocabulary import tokens_of_model
from ..settings import SHARDED, STRATEGIES, Settings
from ..training.build import read_and_split
from .empty_model import MicroBatch, run_micro_batch


@dataclass(frozen=True)
class Plan:
    """A training step before it is computed. `memory.py` and `traffic.py` have the formulas."""

    settings: Settings
    strategy: str  # that of the settings, or another one for comparison; so is the next one
    cpu_offload: bool
    model: PreTrainedModel  # has shapes, but no data
    order: list[torch.Tensor]  # its parameters that get a gradient, in the order in which backward() computes them
    batches: BatchPlan
    device: torch.device  # where the ranks train
    topology: Topology
    run: Callable[[int, str], MicroBatch]  # the passes of a number of rows, with a `--param_dtype`

    def with_each_strategy(self) -> list[Plan]:
        variants = [*((strategy, False) for strategy in STRATEGIES), ("zero3", True)]
        return [replace(self, strategy=strategy, cpu_offload=offload) for strategy, offload in variants]

    @property
    def flags(self) -> str:
        """The strategy, as it is written on a command line."""
        return f"{self.strategy} --cpu_offload" if self.cpu_offload else self.strategy

    @property
    def trainable(self) -> list[torch.Tensor]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def find_unused_parameters(self) -> bool:
        # Without the flag, the run would end in its first step and ask for it.
        return self.settings.ddp_find_unused_parameters or len(self.order) < len(self.trainable)

    @property
    def bucket_cap(self) -> int | None:
        """DDP's bucket size in bytes; None: PyTorch's, whose first bucket is smaller."""
        cap = self.settings.ddp_bucket_cap_mb
        return None if cap is None else cap * MIB

    @property
    def on_gpus(self) -> bool:
        """Whether NCCL connects the ranks, and not gloo."""
        return self.device.type == "cuda"

    def activations(self, rows: int | None = None) -> MicroBatch:
        """Return the passes of a micro-batch of the plan, or of a number of rows."""
        # Only what FSDP2 gathers is in --param_dtype.
        param_dtype = self.settings.param_dtype if self.strategy in SHARDED else "fp32"
        return self.run(rows or self.batches.micro_size, param_dtype)


def build_plan(settings: Settings, topology: Topology) -> Plan:
    """Read the data and the model's config, and plan a training step.

    Raises:
        UserError: the data, the batch size or the model is invalid.
    """
    table, split, batches = read_and_split(settings, topology.ranks)
    settings = replace(settings, revision=resolve_commit(settings))
    tokenizer = load_tokenizer(settings, table.sample_texts(split.train))
    device = torch.device("cuda" if torch.cuda.is_available() and not settings.use_cpu else "cpu")
    config = classifier_config(settings, table.class_names, tokenizer, device=device)
    tokens = occurring_tokens(tokenize(table, tokenizer, settings.max_length))
    n_tokens = len(tokens_of_model(tokens, tokenizer, config))
    return plan_step(settings, config, batches, n_tokens=n_tokens, device=device, topology=topology)


def plan_step(
    settings: Settings,
    config: PretrainedConfig,
    batches: BatchPlan,
    *,
    n_tokens: int | None = None,
    device: torch.device,
    topology: Topology,
) -> Plan:
    """Plan a training step of a model.

    Args:
        n_tokens: as for `run_micro_batch`.

    Raises:
        UserError: the model does not support `--activation_checkpointing`, or its computation depends on data.
    """

    @cache
    def run(rows: int, param_dtype: str) -> MicroBatch:
        changed = replace(settings, param_dtype=param_dtype)  # type: ignore[arg-type]
        return run_micro_batch(changed, config, n_tokens=n_tokens, rows=rows, device=device)

    batch = run(batches.micro_size, "fp32")
    offload = settings.cpu_offload
    return Plan(settings, settings.strategy, offload, batch.model, batch.order, batches, device, topology, run)
