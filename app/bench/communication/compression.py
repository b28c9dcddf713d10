"""The section of the laboratory on `--ddp_comm_hook`: the time of a training step, the bytes it sends, the accuracy."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup
from matplotlib.figure import Figure as Canvas
from tqdm import tqdm

from ...common.charts import INK, draw_bars, render_svg
from ...common.errors import UserError
from ...common.formats import MIB, format_size
from ...common.terminal import hides_progress
from ...data.sampler import plan_batches
from ...distributed.collectives import raise_on_all_ranks
from ...distributed.world import World
from ...report.statistics import Paired, paired
from ...settings import Settings
from ...training.build import ReviewData, build_data, build_model
from ..page import Figure, Part, Section, Table
from ..rounds import ratios
from ..steps import distribute, plain_ddp
from ..traffic import STEPS, count_third_step, sent_bytes
from .step_variants import Variant, compare, models
from .trainings import accuracy_chart, describe_difference, interval_of, train

HOOKS = ("no", "fp16", "bf16", "power_sgd")  # the values of --ddp_comm_hook
MOST_STEPS = 150  # of a training, unless --max_steps is set


@dataclass(frozen=True)
class Measured:
    """The measurements with one hook."""

    seconds: Sequence[float]  # per training step, in each round, on the slowest rank
    sent: float  # bytes that a rank sends per step
    accuracies: list[float]  # of the test rows, with each seed


def settings_by_hook(settings: Settings, seeds: int, *, n_train: int, ranks: int) -> tuple[dict[str, Settings], str]:
    """Return the settings of a training with each hook, and why PowerSGD is left out, or "" if it is not.

    The strategy is `ddp`, unless it is `zero1`, which has these hooks as well.

    Raises:
        UserError: a seed is too large, or the batch cannot be divided.
    """
    settings = replace(plain_ddp(settings), strategy="zero1" if settings.strategy == "zero1" else "ddp")
    replace(settings, seed=settings.seed + seeds - 1)  # raises if it is too large
    by_hook, refusal = {}, ""
    for hook in HOOKS:
        try:
            hooked = replace(settings, ddp_comm_hook=hook)  # type: ignore[arg-type]
            plan_batches(hooked, n_train, ranks)
            by_hook[hook] = hooked
        except UserError as problem:
            if hook != "power_sgd":
                raise
            refusal = str(problem)
    return by_hook, refusal


def measure_hooks(
    by_hook: Mapping[str, Settings], data: ReviewData, *, seeds: int, seconds: float, world: World
) -> tuple[dict[str, Measured], int]:
    """Time the training step with each hook, count its bytes, and train with each hook and seed. Collective.

    Args:
        by_hook: the settings of the trainings, which differ in the hook only; `seed` is the first seed.
        data: of the first seed, also for the timed steps.
        seconds: about how long to time the step with each hook.

    Returns:
        The measurements by hook, and the number of steps of a training.
    """
    settings = next(iter(by_hook.values()))
    # PowerSGD compresses from the third step on, because 10% of so few steps is less than its minimum of 2. A call that
    # is timed is preceded by two others.
    short = {hook: replace(hooked, max_steps=STEPS) for hook, hooked in by_hook.items()}
    variants = {hook: Variant(hooked) for hook, hooked in short.items()}
    comparison = compare(models(settings.model)[0], variants, data, seconds=seconds, world=world)
    gc.collect()  # DDP's modules are part of reference cycles, and each holds a complete model
    sent = {hook: count_sent(hooked, data, world) for hook, hooked in short.items()}
    gc.collect()
    accuracies: dict[str, list[float]] = {hook: [] for hook in by_hook}
    hide_bar = hides_progress(settings.disable_tqdm, world.is_main_process)
    with tqdm(total=seeds * len(by_hook), unit=" runs", disable=hide_bar, leave=False) as bar:
        for seed in range(settings.seed, settings.seed + seeds):
            if seed != settings.seed:  # its data is what the steps were timed with
                data = build_data(replace(settings, seed=seed, disable_tqdm=True), world)
            for hook, hooked in by_hook.items():
                accuracies[hook].append(train(with_steps(hooked, seed, data), data, world).accuracy)
                gc.collect()
                bar.update()
    measured = {hook: Measured(comparison.seconds[hook], sent[hook], accuracies[hook]) for hook in by_hook}
    return measured, training_steps(settings.max_steps, data.plan.total_steps)


def count_sent(settings: Settings, data: ReviewData, world: World) -> float:
    bench = distribute(settings, data, build_model(settings, data, world).model, world=world)
    return sent_bytes(count_third_step(bench), world.topology)


def with_steps(settings: Settings, seed: int, data: ReviewData) -> Settings:
    """Return the settings of a training with a seed."""
    return replace(settings, seed=seed, max_steps=training_steps(settings.max_steps, data.plan.total_steps))


def training_steps(max_steps: int, total_steps: int) -> int:
    return max_steps if max_steps > 0 else min(MOST_STEPS, total_steps)


PLAIN = "no"

ABOUT = (
    "Time and bytes of a step with each --ddp_comm_hook, and the accuracy of the test rows after {steps} steps, for "
    "{seeds} seed(s): docs/communication.md#compressed-gradients explains them and their intervals."
)


def measure_compression(settings: Settings, data: ReviewData, seeds: int, *, seconds: float, world: World) -> Section:
    """Measure all hooks, and return the section of the page. Collective. Arguments as for `measure_hooks`.

    Raises:
        AgreedError: a user's mistake.
    """
    with raise_on_all_ranks(world):
        by_hook, refusal = settings_by_hook(settings, seeds, n_train=len(data.split.train), ranks=world.size)
    measured, steps = measure_hooks(by_hook, data, seeds=seeds, seconds=seconds, world=world)
    return as_section(measured, steps, world, refusal=refusal)


def as_section(measured: Mapping[str, Measured], steps: int, world: World, *, refusal: str = "") -> Section:
    effects = {hook: paired(result.accuracies, measured[PLAIN].accuracies) for hook, result in measured.items()}
    accuracies = {hook: result.accuracies for hook, result in measured.items()}
    seeds = len(measured[PLAIN].accuracies)
    parts: list[Part] = [result_table(measured, effects)]
    if world.is_main_process:  # only it writes the page
        parts.append(Figure("Bytes that a rank sends per step", bytes_chart(measured)))
        if seeds > 1:
            note = "Each dot is one seed; the line is the mean with its 95% confidence interval over the seeds."
            parts.append(Figure("Accuracy compared with no compression", accuracy_chart(accuracies, effects), note))
    paragraphs = [ABOUT.format(steps=steps, seeds=seeds)]
    if refusal:
        paragraphs.append(f"power_sgd is left out: {refusal}.")
    if world.size == 1:
        paragraphs.append("With one rank nothing is sent, but gradients are compressed in the same way.")
    data = {
        hook: {
            "seconds_per_step": result.seconds,
            "bytes_sent_per_step": result.sent,
            "accuracies": result.accuracies,
            "accuracy_difference": effects[hook].mean_a - effects[hook].mean_b,
            "interval": interval_of(effects[hook]),
            "p_value": effects[hook].p_value,
        }
        for hook, result in measured.items()
    }
    return Section("compression", "Compressed gradients", paragraphs, parts, {"steps": steps, "hooks": data})


def result_table(measured: Mapping[str, Measured], effects: Mapping[str, Paired]) -> Table:
    plain = measured[PLAIN]
    header = (
        "hook",
        "ms per step",
        "relative time",
        "sent per step",
        "share",
        "accuracy",
        "difference, points",
        "break-even link speed",
    )
    rows = []
    for hook, result in measured.items():
        middle, low, high = (ratio - 1 for ratio in ratios(result.seconds, plain.seconds))
        compared = f"{middle:+.1%} [{low:+.1%}, {high:+.1%}]"
        rows.append(
            (
                hook,
                f"{1000 * statistics.median(result.seconds):.1f}",
                "" if hook == PLAIN else compared,
                format_size(result.sent),
                f"{result.sent / plain.sent:.1%}" if plain.sent else "–",
                f"{effects[hook].mean_a:.2%}",
                "" if hook == PLAIN else describe_difference(effects[hook]),
                "" if hook == PLAIN else break_even(result, plain),
            )
        )
    return Table(
        "Time, bytes and accuracy", header, rows, "Relative time: median of the rounds' ratios [lowest, highest]."
    )


def break_even(result: Measured, plain: Measured) -> str:
    """Return the speed of a link below which a hook makes a step faster, if nothing of the exchange is hidden."""
    costs = [a - b for a, b in zip(result.seconds, plain.seconds, strict=False)]  # one may have fewer rounds
    if result.sent >= plain.sent or min(costs) <= 0:
        return "–"
    return f"{8 * (plain.sent - result.sent) / statistics.median(costs) / 1e9:.2g} Gbit/s"


def bytes_chart(measured: Mapping[str, Measured]) -> Markup:
    def draw(canvas: Canvas) -> None:
        axes = canvas.add_subplot(xlabel="MiB")
        sent = [result.sent / MIB for result in measured.values()]
        (bars,) = draw_bars(axes, list(measured), {"sent": sent})
        axes.bar_label(bars, [f"{value:.3g}" for value in sent], padding=4, color=INK)
        axes.set_xlim(0, 1.15 * max(*sent, 1e-9))
        axes.grid(visible=False)

    return render_svg(190, "Bytes that a rank sends per step with each hook", draw)
