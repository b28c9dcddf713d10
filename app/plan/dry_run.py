"""`--dry_run`: print the plan of a run, instead of training."""

from __future__ import annotations

from ..checkpoint.resume import Resume, check_compatible
from ..data.tokenize import hash_tokens, lengths_of
from ..distributed.collectives import raise_on_all_ranks
from ..distributed.world import World
from ..model.identity import ModelIdentity, describe_config, hash_code
from ..model.load import is_pretrained
from ..settings import Settings
from ..training.build import check_rows
from ..training.console import describe_resume
from ..training.prepare import complete_settings, resolve_settings
from .report import describe_run_plan
from .step import Sources, plan_sources, read_sources


def print_plan(path_name: str, given: Settings, world: World) -> None:
    """Print the plan of a run: memory and traffic with its strategy, ranks and batch. Collective.

    The run's mistakes are reported, except for those that only its weights show. No weights are loaded, and nothing is
    written.
    """
    settings, resume = resolve_settings(path_name, given, world)
    with raise_on_all_ranks(world):
        if world.is_main_process:
            sources = read_sources(settings, world.size)
            completed = complete_settings(
                settings,
                given,
                sources.batches,
                pretrained=is_pretrained(settings.model),
                config=sources.config,
            )
            check_sources(path_name, completed, sources, resume=resume)
            plan = plan_sources(settings, sources, world.topology)
            print("\n\n".join([*describe_resume(resume), describe_run_plan(plan)]), flush=True)


def check_sources(path_name: str, settings: Settings, sources: Sources, *, resume: Resume) -> None:
    """Check the reviews' tokens, and that the checkpoint to resume from fits, as the run would."""
    table, rows, lengths = sources.table, sources.rows, lengths_of(sources.rows)
    check_rows(settings, sources.config, table=table, rows=rows, lengths=lengths, tokens=sources.tokens)
    identity = ModelIdentity(
        sources.commit,
        describe_config(sources.config),
        hash_code(settings.model, settings.trust_remote_code),
        hash_tokens(rows, sources.tokenizer),
    )
    check_compatible(
        resume,
        settings=settings,
        fingerprint=sources.split.fingerprint,
        total_steps=sources.batches.total_steps,
        model=identity,
    )
