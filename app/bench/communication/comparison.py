"""The section that shows how variants of a training step compare: a chart, and a table for each model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...common.charts import Series, points_with_ranges
from ..charts import format_seconds
from ..page import Figure, Part, Section, Table
from .step_variants import Comparison

Column = tuple[str, Mapping[str, str]]  # its header, and its cells by variant


def comparison_section(
    name: str,
    title_and_text: tuple[str, Sequence[str]],
    comparisons: Sequence[Comparison],
    *,
    unit: str,
    draw: bool,
    extra_columns: Mapping[str, Column] | None = None,
) -> Section:
    """Return a section.

    Args:
        unit: what a time is the time of.
        draw: whether this rank writes the page.
        extra_columns: the last column of each model's table.
    """
    title, paragraphs = title_and_text
    parts: list[Part] = []
    if draw:
        baseline = next(iter(comparisons[0].seconds))
        note = f"The median over rounds, and the range. Each line is compared with {baseline}."
        label = f"time per {unit}, relative to {baseline}"
        series = [
            Series(compared.model, {name: compared.relative(name) for name in compared.seconds})
            for compared in comparisons
        ]
        parts.append(Figure(title, points_with_ranges(title, label, series, show="{:g}".format, reference=1), note))
    for comparison in comparisons:
        column = (extra_columns or {}).get(comparison.model)
        header = ["", f"time per {unit}", "relative", "lowest", "highest", *([column[0]] if column else [])]
        rows = []
        for variant in comparison.seconds:
            numbers = [f"{number:.3f}" for number in comparison.relative(variant)]
            extra = [column[1][variant]] if column else []
            rows.append([variant, format_seconds(comparison.median(variant)), *numbers, *extra])
        parts.append(Table(comparison.model, header, rows))
    data = {comparison.model: {"seconds": comparison.seconds} for comparison in comparisons}
    return Section(name, title, paragraphs, parts, data)
