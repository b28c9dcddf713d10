"""Predict steps under `zero1`, `zero2` and `zero3` from the collectives that `app.plan` counts.

The inputs are steps of two ranks that exchange nothing under the same strategy, and the time of each collective among
two ranks. See docs/scaling.md#strategies.
"""

from __future__ import annotations

import math

from transformers import PretrainedConfig

from ...data.sampler import plan_batches
from ...distributed.world import Topology
from ...plan.step import Plan, device_of, plan_step
from ...plan.traffic import Collective
from ...settings import Settings
from ..alpha_beta import AlphaBeta
from ..rounds import Interval
from .configuration import FIT_RANKS, Alone, Configuration
from .predict import Computation, Cores, Fits, local_network, predict, predict_step


def plan_strategies(config: PretrainedConfig, length: int, use_cpu: bool) -> Plan:
    """Plan the memory and the traffic of a model's training step with any strategy and any number of ranks."""
    settings = Settings(use_cpu=use_cpu, max_length=length, train_batch_size=1)
    batches = plan_batches(settings, n_train=1, world_size=1)
    return plan_step(settings, config, batches, device=device_of(use_cpu), topology=Topology(1))


def predict_strategy(configuration: Configuration, fits: Fits, plan: Plan, *, cores: int, threads: int) -> Interval:
    """Predict the time of a step with two or more ranks, and its bounds: see `Fits.with_bounds`."""
    if configuration.strategy == "ddp":
        return predict(configuration, fits, cores=cores, threads=threads)
    ranks, strategy = configuration.ranks, configuration.strategy
    shared = Cores(cores, ranks, threads)
    replicated = fits.computation[Alone(configuration.rows)]
    computation = fits.computation[Alone(configuration.rows, strategy)]
    # Two ranks have measured the update of a half; with more ranks, each updates less.
    update = replicated.seconds - replicated.buckets[-1][1]
    saved = update * (updated_share(plan, strategy, FIT_RANKS) - updated_share(plan, strategy, ranks))
    computation = Computation(computation.seconds - saved, computation.buckets)
    collectives = plan.traffic(strategy, ranks)
    steps = []
    for bound in fits.with_bounds(replicated.size):
        own = computation.scaled(bound.spread)
        if strategy == "zero1":
            # DDP exchanges the gradients; the updated parameters are sent at the end.
            step = predict_step(own, local_network(bound.local, fits.local_cpu, shared), shared)
            waiting = [collective for collective in collectives if collective.purpose == "parameters"]
        else:
            step = own.seconds * shared.slowdown
            waiting = [collective for collective in collectives if collective.operation in bound.collectives]
        steps.append(step + sum(seconds_of(one, bound.collectives[one.operation], shared) for one in waiting))
    return Interval(steps[0], min(steps), max(steps))


def updated_share(plan: Plan, strategy: str, ranks: int) -> float:
    """Return the share of the parameters that the rank updates which updates most."""
    moments = [memory.optimizer for memory in plan.memory(strategy, ranks)]
    return max(moments) / plan.memory("ddp", ranks)[0].optimizer


def seconds_of(collective: Collective, line: AlphaBeta, cores: Cores) -> float:
    """Return the seconds of a collective among all ranks of a node, which all wait for it.

    Args:
        line: the same among two ranks, by the size of the complete tensor. Each of them sends one message of half of
            it on average.
    """
    ranks = cores.ranks
    # A broadcast is a binary tree; in the others, each rank sends a message to, or receives one from, each other rank.
    messages = math.ceil(math.log2(ranks)) if collective.operation == "broadcast" else ranks - 1
    seconds = line.seconds(2 * (ranks - 1) / ranks * collective.size, messages=messages)
    return collective.times * cores.slowdown * seconds
