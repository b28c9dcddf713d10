"""Trainer's engines, which replace the strategy: DeepSpeed (`--deepspeed`) and FSDP2 (`--fsdp`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..data.sampler import BatchPlan
from ..distributed.world import World
from ..settings import Settings
from ..strategies.base import Strategy
from .deepspeed_config import Config, changes_of_config, check_engine, complete_config, read_config
from .deepspeed_engine import DeepSpeed
from .fsdp import TrainerFSDP


class TrainerEngine:
    """Implements `app.training.prepare.Engine`.

    Attributes:
        config: the configuration of DeepSpeed, from `read_config` on; None with `--fsdp`.
    """

    def __init__(self) -> None:
        self.config: Config | None = None

    def check(self, settings: Settings, world: World) -> None:
        """Check that this machine can use the engine.

        Raises:
            UserError: DeepSpeed is not installed, or `--fsdp` has no GPUs.
        """
        check_engine(settings, world)

    def read_config(self, settings: Settings, world: World) -> None:
        """Read the file that `--deepspeed` names. Collective.

        Raises:
            AgreedError: rank 0 can't read the file.
        """
        self.config = read_config(settings, world)

    def complete_config(self, settings: Settings, plan: BatchPlan, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Complete the configuration, and list what has changed since the checkpoint.

        Args:
            settings: with the learning rate filled in.
            state: the content of the checkpoint's run_state.json; empty if the run does not resume.

        Raises:
            UserError: a value contradicts the settings, is unknown or is not supported.
        """
        if self.config is None:
            return ()
        self.config = complete_config(self.config, settings, plan)
        return changes_of_config(state, self.config)

    def select_strategy(self, settings: Settings, plan: BatchPlan, world: World) -> Strategy:
        if settings.deepspeed is not None:
            return DeepSpeed(settings, plan, world)
        return TrainerFSDP(settings, plan, world)


def select_engine(settings: Settings) -> TrainerEngine | None:
    """Return the engine that the flags select; None if `--strategy` selects a strategy."""
    return TrainerEngine() if settings.trainer_engine else None
