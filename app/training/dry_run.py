"""`--dry_run`: print what a run will need on each rank, instead of training."""

from __future__ import annotations

from app.distributed.collectives import raise_on_all_ranks
from app.distributed.world import World
from app.settings import Settings
from app.training.plan import build_plan
from app.training.plan_tables import describe_run_plan
from app.training.prepare import resolve_settings


def print_plan(path_name: str, settings: Settings, world: World) -> None:
    """Print the plan of a run: memory and traffic with its strategy, ranks and batch. Collective.

    No weights are loaded, and no folder is created.

    Raises:
        AgreedError: a user's mistake on any rank.
    """
    settings, _ = resolve_settings(path_name, settings, world)
    with raise_on_all_ranks(world):
        if world.is_main_process:
            print(describe_run_plan(build_plan(settings, world.size)), flush=True)
