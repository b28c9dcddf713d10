"""Trainer's engines, which replace the strategy: DeepSpeed (`--deepspeed`) and FSDP2 (`--fsdp`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..common.errors import UserError
from ..data.sampler import BatchPlan
from ..distributed.collectives import broadcast_object, raise_on_all_ranks
from ..distributed.world import World
from ..settings import Settings
from ..strategies.base import Strategy
from .deepspeed_config import Config, changes_of_config, complete_config, parse
from .deepspeed_engine import DeepSpeed
from .fsdp import TrainerFSDP

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


def select_engine(settings: Settings) -> TrainerEngine | None:
    """Return the engine that the flags select; None if `--strategy` selects a strategy."""
    return TrainerEngine() if settings.trainer_engine else None
