"""`--dry_run`: print the plan of a run, instead of training."""

from __future__ import annotations

from ..distributed.collectives import raise_on_all_ranks
from ..distributed.world import World
from ..settings import Settings
from ..training.console import block, resume_facts
from ..training.prepare import resolve_settings
from .report import describe_plan
from .step import build_plan


def print_plan(path_name: str, given: Settings, world: World) -> None:
    """Print the plan of a run: memory and traffic with its strategy, ranks and batch. Collective.

    Mistakes in the settings, the reviews and the model's config are reported as by the run. No weights are loaded, and
    nothing is written.
    """
    settings, resume = resolve_settings(path_name, given, world)
    with raise_on_all_ranks(world):
        if world.is_main_process:
            plan = build_plan(settings, world.topology)
            offload = settings.cpu_offload and plan.device.type == "cuda"  # no effect on CPUs
            text = describe_plan(plan, [(settings.strategy, offload)])
            print("\n\n".join(filter(None, [block(resume_facts(resume)), text])), flush=True)
