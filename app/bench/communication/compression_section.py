"""The section of the laboratory on compressed gradients: the time, the bytes and the accuracy of `--ddp_comm_hook`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure as Canvas

from ...common.charts import INK, NEUTRAL, SERIES_COLORS, draw_bars, draw_ranges, name_rows, render_svg
from ...common.formats import MIB, format_size
from ...distributed.collectives import raise_on_all_ranks
from ...distributed.world import World
from ...report.statistics import PairedSeeds, paired_seeds
from ...settings import Settings
from ...training.build import ReviewData
from ..page import Figure, Part, Section, Table
from ..rounds import ratios
from .compression import Measured, measure_hooks, settings_by_hook

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
    """Return the section of the page.

    Args:
        refusal: why PowerSGD is left out, or "" if it is not.
    """
    effects = {hook: paired_seeds(result.accuracies, measured[PLAIN].accuracies) for hook, result in measured.items()}
    seeds = len(measured[PLAIN].accuracies)
    parts: list[Part] = [result_table(measured, effects)]
    if world.is_main_process:  # only it writes the page
        parts.append(Figure("Bytes that a rank sends per step", bytes_chart(measured)))
        if seeds > 1:
            note = "Each dot is one seed; the line is the mean with its 95% confidence interval over the seeds."
            parts.append(Figure("Accuracy compared with no compression", accuracy_chart(measured, effects), note))
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


def interval_of(effect: PairedSeeds) -> tuple[float, float] | None:
    """Return the limits of the confidence interval of a difference, if there is one."""
    return (effect.difference.low, effect.difference.high) if effect.difference else None


def result_table(measured: Mapping[str, Measured], effects: Mapping[str, PairedSeeds]) -> Table:
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


def describe_difference(effect: PairedSeeds) -> str:
    """Return a difference in percentage points with its interval."""
    difference = f"{100 * (effect.mean_a - effect.mean_b):+z.2f}"
    limits = interval_of(effect)
    return f"{difference} [{100 * limits[0]:+z.2f}, {100 * limits[1]:+z.2f}]" if limits else difference


def break_even(result: Measured, plain: Measured) -> str:
    """Return the speed of a link below which a hook makes a step faster, if nothing of the exchange is hidden."""
    costs = [a - b for a, b in zip(result.seconds, plain.seconds, strict=False)]  # one may have fewer rounds
    if result.sent >= plain.sent or min(costs) <= 0:
        return "–"
    return f"{8 * (plain.sent - result.sent) / statistics.median(costs) / 1e9:.2g} Gbit/s"


def bytes_chart(measured: Mapping[str, Measured]) -> Markup:
    """Plot the bytes of each hook as bars, each with its number."""

    def draw(canvas: Canvas) -> None:
        axes = canvas.add_subplot(xlabel="MiB")
        sent = [result.sent / MIB for result in measured.values()]
        (bars,) = draw_bars(axes, list(measured), {"sent": sent})
        axes.bar_label(bars, [f"{value:.3g}" for value in sent], padding=4, color=INK)
        axes.set_xlim(0, 1.15 * max(*sent, 1e-9))
        axes.grid(visible=False)

    return render_svg(190, "Bytes that a rank sends per step with each hook", draw)


def accuracy_chart(measured: Mapping[str, Measured], effects: Mapping[str, PairedSeeds]) -> Markup:
    """Plot the differences of the accuracy over seeds, in percentage points, with their intervals."""
    hooks = [hook for hook in measured if hook != PLAIN]

    def draw(canvas: Canvas) -> None:
        axes = canvas.add_subplot(xlabel="percentage points")
        axes.axvline(0, color=NEUTRAL, linewidth=1)
        for row, hook in enumerate(hooks):
            pairs = zip(measured[hook].accuracies, measured[PLAIN].accuracies, strict=True)
            differences = [100 * (accuracy - plain) for accuracy, plain in pairs]
            axes.plot(differences, [row] * len(differences), "o", color=SERIES_COLORS[1], markersize=6, alpha=0.7)
            mean = statistics.mean(differences)
            low, high = (100 * limit for limit in interval_of(effects[hook]) or (mean / 100, mean / 100))
            bar: dict[str, Any] = {"marker": "|", "color": SERIES_COLORS[0], "markersize": 18, "markeredgewidth": 2.5}
            draw_ranges(axes, [row], [(mean, low, high)], horizontal=True, **bar)
        name_rows(axes, hooks)
        axes.grid(visible=False)

    return render_svg(190, "Difference of the accuracy from that without compression", draw)
