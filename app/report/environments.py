"""The jinja2 environments of the reports."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment

from ..common.formats import template_environment


def percent(share: float, decimals: int = 1) -> str:
    """Format a share as a percentage."""
    return f"{100 * share:.{decimals}f}%"


def points(difference: float) -> str:
    """Format a difference between two shares in percentage points, with its sign."""
    return f"{100 * difference:+z.2f}".replace("-", "−")


def markdown_environment() -> Environment:
    """Create the environment of the Markdown templates, which escape untrusted text with the filter `cell`."""
    return _environment(autoescape=False)


def html_environment() -> Environment:
    """Create the environment of the HTML templates: everything is escaped except the plots, which are `Markup`."""
    return _environment(autoescape=True)


def _environment(autoescape: bool) -> Environment:
    environment = template_environment(Path(__file__).with_name("templates"), autoescape)
    environment.filters.update(percent=percent, points=points)
    return environment
