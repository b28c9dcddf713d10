"""The sections of the laboratory by name: whether each can be measured, and its measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...common.errors import UserError
from ...data.sampler import plan_batches
from ...distributed.world import World
from ...flags import STEP_SECONDS
from ...settings import Settings
from ...training.build import ReviewData
from ..page import Section
from . import batch_size, convergence, gpus, granularity, messages, readiness, training_step
from .collectives_section import check_largest, measure_collectives
from .compression import measure_compression, settings_by_hook


@dataclass(frozen=True)
class Options:
    """What the flags select: the largest tensor in bytes, and how long and how often to measure."""

    largest: int
    seconds_per_point: float
    seeds: int
    over_link: bool = False
    pretrained: bool = False  # whether the model has weights of its own


def check(names: Sequence[str], settings: Settings, options: Options, *, n_train: int, world: World) -> None:
    """Check, before anything is measured, that every section can be.

    Args:
        n_train: the number of training rows; 0 if no section trains.

    Raises:
        UserError: a setting or a flag that a section cannot be measured with.
    """
    for name in names:
        try:
            _check(name, settings, options, n_train=n_train, world=world)
        except UserError as problem:
            raise UserError(f"section {name}: {problem} (--sections names those to measure)") from None


def _check(name: str, settings: Settings, options: Options, *, n_train: int, world: World) -> None:
    match name:
        case "collectives":
            check_largest(options.largest, world.size)
        case "point_to_point":
            messages.check_peers(world.size)
            check_largest(options.largest, 1)
        case "backends":
            gpus.check_gpus(name, world)
        case "operations" | "granularity" | "ladder":
            pass
        case "compression":
            settings_by_hook(settings, options.seeds, n_train=n_train, ranks=world.size)
        case "convergence":
            convergence.variants_of(settings, n_train, world.size, pretrained=False)
        case "readiness":
            plan_batches(settings, n_train, world.size)
        case "batch_size":
            if not batch_size.batch_size_variants(settings, n_train, world.size):
                raise UserError(f"{n_train} training rows are not enough for a batch")
        case "data_parallel":
            gpus.check_gpus(name, world, at_least=2)
            plan_batches(settings, n_train, world.size)
        case _:
            training_step.variants_of(name, settings, n_train, topology=world.topology)


def measure(name: str, settings: Settings, data: ReviewData | None, *, options: Options, world: World) -> Section:
    """Measure a section. Collective."""
    largest, per_point, tqdm_flag = options.largest, options.seconds_per_point, settings.disable_tqdm
    seconds = STEP_SECONDS * per_point
    match name:
        case "collectives":
            return measure_collectives(world, largest, seconds_per_point=per_point, disable_tqdm=tqdm_flag)
        case "point_to_point":
            return messages.measure_messages(world, largest, seconds_per_point=per_point, disable_tqdm=tqdm_flag)
        case "backends":
            return gpus.measure_backends(world, largest, seconds_per_point=per_point, disable_tqdm=tqdm_flag)
        case "operations":
            return messages.measure_operations(world, largest, seconds=seconds, disable_tqdm=tqdm_flag)
        case "granularity":
            return granularity.measure_granularity(largest, seconds=seconds, world=world, disable_tqdm=tqdm_flag)
    assert data is not None, "the others train"
    match name:
        case "compression":
            return measure_compression(settings, data, options.seeds, seconds=seconds, world=world)
        case "convergence":
            pretrained = options.pretrained
            return convergence.measure_convergence(settings, data, options.seeds, pretrained=pretrained, world=world)
        case "readiness":
            return readiness.measure_readiness(settings, data, seconds=seconds, world=world)
        case "batch_size":
            return batch_size.measure_batch_size(settings, data, seconds=seconds, world=world)
        case "data_parallel":
            return gpus.measure_data_parallel(settings, data, seconds=seconds, world=world)
        case _:
            over_link = options.over_link
            return training_step.measure_step(name, settings, data, seconds=seconds, world=world, over_link=over_link)
