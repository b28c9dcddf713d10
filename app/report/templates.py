"""The jinja2 environments of the reports. Reviews and class names are untrusted text: each format has its own
escape."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

LONGEST_CELL = 160


def markdown_cell(text: str) -> str:
    """Untrusted text as one cell of a Markdown table: one line, no HTML, no markup, nothing a terminal would obey."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    line = line if len(line) <= LONGEST_CELL else line[: LONGEST_CELL - 1] + "…"
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join("\\" + c if c in r"\`*_[]|" else c for c in line)


def markdown_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["cell"] = markdown_cell
    return environment
