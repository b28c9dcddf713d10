"""The plots: well-formed, reproducible, in the page's colors, and unaffected by what names contain."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from app.report import charts

NAMES = ["ddp_loop", "trainer_run"]
HOSTILE = '<script>document.title=\'ran\'</script>--><img src=x onerror=alert(1)>$\\frac{$&quot;" id="x_1" \x00'
LOSSES = [[0.7, 0.5, 0.4, 0.3], [0.7, 0.5, 0.45, 0.3]]


def every_plot(names=NAMES) -> dict[str, Markup]:
    return {
        "losses": charts.loss_curves(LOSSES, names),
        "difference": charts.loss_difference(LOSSES),
    }


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(str(svg).replace("<svg ", '<svg xmlns:xlink="http://www.w3.org/1999/xlink" ', 1))


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in parsed(svg).iter() if element.tag.endswith("text")]


def test_each_plot_is_one_svg_that_scales():
    for name, svg in every_plot().items():
        assert isinstance(svg, Markup)
        root = parsed(svg)
        assert root.tag == "svg", name
        assert root.get("width") is None
        assert root.get("viewBox", "").startswith("0 0 480 ")
        assert texts(svg), "text is text"


def test_plots_are_the_same_twice_with_any_matplotlibrc(monkeypatch):
    first = every_plot()
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 40)
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "path")
    assert every_plot() == first
    assert matplotlib.rcParams["font.size"] == 40, "the user's own settings are unchanged"


def test_colors_are_variables_of_the_page():
    for name, svg in every_plot().items():
        assert not re.findall(r"#[0-9a-fA-F]{6}\b", svg), name
        assert set(re.findall(r"var\(--(\w+)\)", svg)) <= {"ink", "muted", "rule", "card", "neutral", "a", "b"}


def test_plots_make_no_requests():
    for svg in every_plot().values():
        assert not re.search(r"(href|src)=\"(?!#)|url\((?!#)|<image|<script|<!--|<metadata", svg)


def test_names_that_contain_html_stay_text():
    for name, svg in every_plot([HOSTILE, HOSTILE[::-1]]).items():
        tags = set(re.findall(r"<(\w+)", svg))
        assert tags <= {"svg", "defs", "style", "g", "path", "use", "text", "tspan", "clipPath", "rect"}, name


def test_plots_have_no_ids_in_common():
    """Two elements with the same id would use each other's clip paths and markers."""
    seen: set[str] = set()
    for svg in every_plot().values():
        ids = re.findall(r' id="([^"]+)"', svg)
        assert len(ids) == len(set(ids))
        assert not seen & set(ids)
        seen |= set(ids)
        assert set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', svg)) <= {
            pair for name in ids for pair in ((name, ""), ("", name))
        }


def test_identical_losses_are_labeled():
    assert "bitwise identical: 3 of 4 steps" in texts(charts.loss_difference(LOSSES))


def test_powers_of_ten_are_plain_text():
    shown = " ".join(texts(charts.loss_difference([[1.0, 1.0, 1.0], [1.1, 1.001, 1.00001]])))
    assert "1e-03" in shown
    assert "$" not in shown


@pytest.mark.parametrize(
    "losses",
    [
        [[0.7], [0.7]],
        [[0.7], [0.6]],
        [[0.7, 0.5, 0.3], [0.7]],
        [[math.nan, 0.5], [0.5, math.nan]],
        [[math.inf, 0.5], [0.5, 0.5]],
        [[1e-300, 0.5], [0.0, 0.5]],
        [[-0.5, 0.5], [0.5, 0.5]],
    ],
)
def test_unusual_losses_can_be_plotted(losses):
    parsed(charts.loss_curves(losses, NAMES))
    parsed(charts.loss_difference(losses))


def test_the_plot_of_a_long_training_is_small():
    noise = np.random.default_rng(0).uniform(size=(2, 200_000)).tolist()
    assert len(charts.loss_curves(noise, NAMES)) < 300_000
    assert len(charts.loss_difference(noise)) < 100_000


@pytest.mark.parametrize("name", ["a\\b", r"\1\g<0>\g<x>", "runs\\2026\\", "#010101", "var(--ink)", ' id="a_1"', "a>b"])
def test_names_that_look_like_markup_are_shown_literally(name):
    label = parsed(charts.loss_curves(LOSSES, [name, "b"])).get("aria-label")
    assert label == f"Training loss of {name} and b at each step"


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"])))
def test_any_name_gives_a_valid_plot(name):
    label = parsed(charts.render_svg(100, name, lambda _: None)).get("aria-label")
    assert label is not None
    assert label.split() == name.split()
