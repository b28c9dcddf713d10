"""What the benchmarks of memory and traffic share: a step under each strategy, next to what app.plan predicts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pandas as pd

from ..common.errors import RunError, UserError
from ..common.formats import markdown_table
from ..common.paths import SAMPLE_CSV
from ..distributed.collectives import all_gather_object, local_main_process_first, raise_on_all_ranks
from ..distributed.process_group import join
from ..model.vocabulary import trimmed_vocabulary
from ..plan.step import Plan, plan_step
from ..settings import STRATEGIES, Settings
from ..training.build import build_data
from ..training.console import quiet_libraries
from .models import with_model_folder
from .steps import Bench, build_bench

# Returns this rank's figures: a row for each, with the columns PREDICTED and MEASURED.
Measure = Callable[[Bench, Plan], pd.DataFrame]
PREDICTED, MEASURED = "predicted", "measured"


def compare_with_plan(settings: Settings, measure: Measure, tolerance: float = 0.0) -> None:
    """Measure a step under each strategy that supports the settings, and print its figures. Collective.

    The rows are those of the bundled sample, unless others are given, so that figures don't depend on a download.

    Args:
        tolerance: the largest relative difference from a predicted figure.

    Raises:
        RunError: a figure of any rank differs by more than that.
    """
    if settings.csv is None and settings.dataset_name is None:
        settings = replace(settings, csv=str(SAMPLE_CSV))
    with join(settings) as world:
        quiet_libraries(world)
        with local_main_process_first(world):
            settings = with_model_folder(settings)
        data, wrong = build_data(settings, world), []
        for with_strategy in with_each_strategy(settings):
            bench = build_bench(with_strategy, data, world)
            with raise_on_all_ranks(world):
                vocabulary = trimmed_vocabulary(bench.model)
                n_tokens = None if vocabulary is None else len(vocabulary.used)
                config, batches, topology = copy.deepcopy(bench.model.config), bench.data.plan, world.topology
                plan = plan_step(
                    with_strategy, config, batches, n_tokens=n_tokens, device=world.device, topology=topology
                )
            world.print_main(f"## {with_strategy.strategy}\n")
            of_ranks = dict(enumerate(all_gather_object(measure(bench, plan), world)))
            rows = pd.concat(of_ranks, names=["ranks"]).reset_index()
            off = (rows[MEASURED] - rows[PREDICTED]).abs() > tolerance * rows[PREDICTED]
            wrong += [f"{with_strategy.strategy}, rank {row.iloc[0]}: {row.iloc[1]}" for _, row in rows[off].iterrows()]
            cells = rows.map(lambda cell: f"{cell:,.1f}" if isinstance(cell, float) else f"{cell}")
            # Ranks with the same figures have one row.
            merged = cells.groupby(list(cells)[1:], sort=False)["ranks"].agg(", ".join).reset_index()
            header, text_columns = [str(name) for name in merged], merged.shape[1] - 3
            world.print_main(markdown_table(header, merged.to_numpy().tolist(), text_columns, aligned=True))
        if wrong:
            raise RunError(f"measured values differ from the plan: {'; '.join(wrong)}")


def with_each_strategy(settings: Settings) -> Iterator[Settings]:
    """Yield the settings with each strategy that supports them."""
    for strategy in STRATEGIES:
        with suppress(UserError):
            yield replace(settings, strategy=strategy, cpu_offload=settings.cpu_offload and strategy == "zero3")  # type: ignore[arg-type]
