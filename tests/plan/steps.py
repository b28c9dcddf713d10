"""Count the collectives of training steps of tiny models, and predict them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from helpers.architectures import CONFIGS, SMALL
from helpers.worlds import batch_plan
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    JambaConfig,
    MixtralConfig,
    PreTrainedConfig,
    RoFormerConfig,
)

from app.bench.steps import Bench
from app.bench.traffic import Counts, as_counts, count_third_step
from app.distributed.world import Topology, World
from app.model.dropout import checkpoint_activations
from app.model.precision import training_dtype
from app.plan.step import plan_step
from app.plan.traffic import plan_traffic
from app.settings import Settings
from app.training.build import select_strategy

LENGTH = 8
MODELS: dict[str, PreTrainedConfig] = CONFIGS | {
    # Dimensions that no number of ranks divides, and gradients of more than 1 MiB.
    "uneven": BertConfig(hidden_size=33, num_hidden_layers=2, num_attention_heads=3, intermediate_size=3001),
    "frozen": DistilBertConfig(dim=32, n_layers=2, n_heads=2, hidden_dim=32, sinusoidal_pos_embds=True),
    "roformer": RoFormerConfig(**SMALL, embedding_size=32),  # its position embeddings are not trained either
    "mixtral": MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2),
    "jamba": JambaConfig(**SMALL, num_key_value_heads=1, num_experts=4, attn_layer_period=2, attn_layer_offset=1),
}


@dataclass(frozen=True)
class Step:
    """A training step whose collectives are counted.

    Attributes:
        name: a model of `MODELS`.
        logical_ranks: by default the number of ranks.
        changes: more settings.
        inside: the number of ranks on each node; by default all ranks are on one node.
    """

    name: str
    strategy: str
    ranks: int
    logical_ranks: int | None = None
    accumulation: int = 1
    changes: dict[str, Any] = field(default_factory=dict)
    inside: int | None = None

    @property
    def config(self) -> PreTrainedConfig:
        """The model's config, with a small vocabulary."""
        config = copy.deepcopy(MODELS[self.name])
        config.vocab_size, config.pad_token_id = 1_009, 0
        config.eos_token_id = 3
        return config

    @property
    def settings(self) -> Settings:
        """The settings of the step."""
        changes = {"ddp_find_unused_parameters": self.name == "xlnet"} | self.changes
        return Settings(
            strategy=self.strategy,
            use_cpu=True,
            max_length=LENGTH,
            gradient_accumulation_steps=self.accumulation,
            **changes,
        )

    def predict(self) -> Counts:
        """The collectives that app.plan predicts."""
        plan = batch_plan(self.ranks, self.logical_ranks, self.accumulation)
        topology = Topology(self.ranks, self.inside or self.ranks)
        step = plan_step(self.settings, self.config, plan, device=torch.device("cpu"), topology=topology)
        return as_counts(plan_traffic(step))

    def count(self, world: World) -> Counts:
        """The collectives that this rank calls."""
        plan, config = batch_plan(self.ranks, self.logical_ranks, self.accumulation), self.config
        strategy = select_strategy(self.settings, plan, world)
        model = AutoModelForSequenceClassification.from_config(config)
        model.to(training_dtype(self.settings.precision))
        if self.settings.activation_checkpointing:
            checkpoint_activations(model)
        ids = torch.full((2, LENGTH), 7)
        ids[:, -1] = 3  # BART and T5 classify the hidden state of the end-of-sequence token
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(2, dtype=torch.int64)}
        batches = [batch] * (3 * plan.micro_batches_per_step)
        data: Any = SimpleNamespace(plan=plan)
        loader: Any = batches
        return count_third_step(Bench(self.settings, world, data, strategy, model, strategy.wrap(model), loader))
