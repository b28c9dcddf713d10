"""The plots: well-formed, reproducible, in the page's colors, and unaffected by what names contain."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from markupsafe import Markup

from app.report import charts

NAMES = ["ddp_loop", "trainer_run"]
HOSTILE = '<script>document.title=\'ran\'</script>--><img src=x onerror=alert(1)>$\\frac{$&quot;" id="x_1"'
HOSTILE += r" \1\g<0>\g<x> #010101 var(--ink) a>b"
TAGS = {"svg", "defs", "style", "g", "path", "use", "text", "clipPath", "rect"}
LOSSES = [[0.7, 0.5, 0.4, 0.3], [0.7, 0.5, 0.45, 0.3]]


def both_plots(names=NAMES, losses=LOSSES) -> list[Markup]:
    return [charts.loss_curves(losses, names), charts.loss_difference(losses)]


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(str(svg).replace("<svg ", '<svg xmlns:xlink="http://www.w3.org/1999/xlink" ', 1))


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in parsed(svg).iter() if element.tag.endswith("text")]


@pytest.mark.parametrize("names", [NAMES, [HOSTILE, HOSTILE[::-1]]], ids=["names", "hostile names"])
def test_each_plot_is_one_svg_in_the_colors_of_the_page_without_scripts_and_requests(names):
    plots = both_plots(names)
    label = f"Training loss of {names[0]} and {names[1]} at each step"
    assert parsed(plots[0]).get("aria-label") == label, "names are shown literally"
    ids = []
    for svg in plots:
        assert isinstance(svg, Markup)
        root = parsed(svg)
        assert (root.tag, root.get("width")) == ("svg", None), "it scales"
        assert root.get("viewBox", "").startswith("0 0 480 ")
        assert texts(svg), "text is text"
        assert set(re.findall(r"<(\w+)", svg)) <= TAGS
        tags = "".join(re.findall("<[^>]*>", svg)[1:])  # without the first one, whose label may contain anything
        assert not re.search(r"(href|src)=\"(?!#)|url\((?!#)|<!--|<metadata", tags)
        assert not re.findall(r"#[0-9a-fA-F]{6}\b", tags), "colors are variables"
        assert set(re.findall(r"var\(--(\w+)\)", tags)) <= {"ink", "muted", "rule", "card", "neutral", "a", "b"}
        own = re.findall(r' id="([^"]+)"', tags)
        assert {*re.findall(r"url\(#([^)]+)\)", tags), *re.findall(r'href="#([^"]+)"', tags)} <= {*own}
        ids += own
    assert len(ids) == len(set(ids)) > 0, "two elements with the same id would use each other's clip paths and markers"


def test_plots_are_the_same_twice_with_any_matplotlibrc(monkeypatch):
    first = both_plots()
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 40)
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "path")
    assert both_plots() == first
    assert matplotlib.rcParams["font.size"] == 40, "the user's own settings are unchanged"


def test_identical_steps_are_counted_and_powers_of_ten_are_plain_text():
    assert "bitwise identical: 3 of 4 steps" in texts(charts.loss_difference(LOSSES))
    shown = " ".join(texts(charts.loss_difference([[1.0, 1.0, 1.0], [1.1, 1.001, 1.00001]])))
    assert "1e-03" in shown
    assert "$" not in shown


@pytest.mark.parametrize(
    "losses",
    [
        [[0.7], [0.7]],
        [[0.7, 0.5, 0.3], [0.7]],
        [[math.nan, 0.5], [0.5, math.nan]],
        [[math.inf, 0.5], [0.5, 0.5]],
        [[1e-300, 0.5], [0.0, -0.5]],
        np.random.default_rng(0).uniform(size=(2, 200_000)).tolist(),  # the plots of a long training are small
    ],
    ids=["one", "shorter", "nan", "infinite", "tiny and negative", "long"],
)
def test_unusual_losses_can_be_plotted(losses):
    for svg in both_plots(losses=losses):
        parsed(svg)
        assert len(svg) < 300_000
