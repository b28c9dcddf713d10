"""The plan of a training step on each rank: predicted from the model's config, without weights and without ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from transformers import PretrainedConfig, PreTrainedModel

from ..common.formats import MIB
from ..data.sampler import BatchPlan
from ..data.tokenize import occurring_tokens, tokenize
from ..distributed.world import Topology
from ..model.hub import resolve_commit
from ..model.load import classifier_config, load_tokenizer
from ..model.vocabulary import tokens_of_model
from ..settings import SHARDED, Settings
from ..strategies.base import add_gradients_per_block
from ..training.build import read_and_split
from .empty_model import Activations, count_activations, empty_batch, empty_model, gradient_order, without_data
from .memory import RankMemory, StepOptions, plan_memory
from .traffic import Collective, plan_traffic


@dataclass(frozen=True)
class Plan:
    """A training step before it is computed."""

    settings: Settings
    model: PreTrainedModel  # has shapes, but no data
    order: list[torch.nn.Parameter]  # those that get a gradient, in the order in which backward() computes them
    batches: BatchPlan
    device: torch.device  # where the ranks train
    topology: Topology
    count: Callable[[int, str], Activations]  # of a number of rows of `--max_length` tokens, under a strategy

    def activations(self, strategy: str) -> Activations:
        return self.count(self.batches.micro_size, strategy)

    @property
    def options(self) -> StepOptions:
        settings, cap = self.settings, self.settings.ddp_bucket_cap_mb
        # Without the flag, the run would end in its first step and ask for it.
        unused = len(self.order) < sum(parameter.requires_grad for parameter in self.model.parameters())
        return StepOptions(
            logical_ranks_per_rank=self.batches.logical_ranks_per_rank,
            accumulation_steps=self.batches.accumulation_steps,
            bucket_cap=None if cap is None else cap * MIB,
            comm_hook=settings.ddp_comm_hook,
            param_dtype=settings.param_dtype,
            reduce_dtype=settings.reduce_dtype,
            find_unused_parameters=settings.ddp_find_unused_parameters or unused,
            on_gpus=self.device.type == "cuda",
        )

    def largest_memory(self, strategy: str) -> RankMemory:
        """Return the memory of the rank that needs most."""
        return max(self.memory(strategy), key=lambda memory: memory.total)

    def memory(self, strategy: str) -> list[RankMemory]:
        return plan_memory(self.model, strategy, topology=self.topology, options=self.options)

    def traffic(self, strategy: str) -> list[Collective]:
        return plan_traffic(self.model, self.order, strategy=strategy, topology=self.topology, options=self.options)


def build_plan(settings: Settings, topology: Topology) -> Plan:
    """Read the data and the model's config, and plan a training step.

    Raises:
        UserError: the data, the batch size or the model is invalid.
    """
    table, split, batches = read_and_split(settings, topology.ranks)
    commit = resolve_commit(settings)
    tokenizer = load_tokenizer(settings, table.sample_texts(split.train), commit)
    device = device_of(settings.use_cpu)
    config = classifier_config(settings, table.class_names, tokenizer, device=device, commit=commit)
    tokens = occurring_tokens(tokenize(table, tokenizer, settings.max_length))
    n_tokens = len(tokens_of_model(tokens, tokenizer, config))
    return plan_step(settings, config, batches, n_tokens=n_tokens, device=device, topology=topology)


def device_of(use_cpu: bool) -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and not use_cpu else "cpu")


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
        n_tokens: as for `empty_model`.

    Raises:
        UserError: the model does not support `--activation_checkpointing`, or its computation depends on data.
    """
    with without_data(device):
        model = empty_model(settings, config, n_tokens)
        add_gradients_per_block(model)
        batch = empty_batch(batches.micro_size, settings.max_length)
        order = gradient_order(model, batch, settings.precision, device=device)

    # Only what FSDP2 gathers is in --param_dtype. Strategies that compute in the same dtype count alike.
    @cache
    def count(rows: int, gathers_bf16: bool) -> Activations:
        counted = settings if gathers_bf16 else replace(settings, param_dtype="fp32")
        return count_activations(counted, config, n_tokens=n_tokens, rows=rows, device=device)

    def count_with(rows: int, strategy: str) -> Activations:
        return count(rows, settings.param_dtype == "bf16" and strategy in SHARDED)

    return Plan(settings, model, order, batches, device, topology, count_with)
