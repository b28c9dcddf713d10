"""comparison.md and comparison.html show what comparison.json contains; untrusted text stays text in both."""

from __future__ import annotations

import html
import json
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from report.conftest import IMAGE, SCRIPT, pair_of

from app.common.formats import markdown_cell
from app.report.comparison import compare_runs, compare_seeds
from app.report.render import SCORES, as_html, as_markdown, metric_rows, write_comparison

ACTIVE_TAG = r"(?i)<(script|img|iframe|object|embed|link|form|base|image|foreignobject)\b"
NAME = SCRIPT + '--><img src=x onerror=alert(1)>$\\frac{$&quot;" id="x_1" \\1\\g<0> #010101 var(--ink) a>b'


@pytest.fixture(scope="module")
def comparison(hostile, tmp_path_factory):
    a = {"learning_rate": 0.5, "path": NAME, "threads": 1, "code": SCRIPT}
    return compare_runs(*pair_of(tmp_path_factory.mktemp("runs"), hostile, a=a, b={"threads": 2, "code": 1}))


def text_of(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def texts(comparison) -> tuple[str, str]:
    """Return what a reader sees in both reports, in one line each, without the emphasis of Markdown."""
    pages = as_markdown(comparison).replace("**", ""), text_of(as_html(comparison))
    return tuple(" ".join(page.split()) for page in pages)


def rows_of(table: str) -> list[str]:
    """Return the lines of a Markdown table of reviews, which have 5 cells each."""
    rows = [line for line in table.splitlines() if re.match(r"\| \d", line)]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 6 for row in rows)
    return rows


def test_the_page_shows_hostile_text_literally_without_scripts_and_requests(comparison):
    page = as_html(comparison)
    assert not re.search(ACTIVE_TAG, page)
    assert not re.search(r"url\((?!#)|@import", page)
    assert """http-equiv="Content-Security-Policy" content="default-src 'none';""" in page
    assert all(text in text_of(page) for text in (SCRIPT, IMAGE, "$\\frac{$"))
    assert plots_of(comparison)[0].get("aria-label") == f"Training loss of {NAME} and trainer_run at each step"


def test_markdown_escapes_hostile_text(comparison):
    markdown = as_markdown(comparison)
    assert not re.search(r"<|\x1b|\]\(http", markdown)
    assert any("onerror" in row and "http" in row for row in rows_of(markdown))


def test_a_markdown_cell_is_one_line_without_markup():
    text = "ddp_loop _a_ *b* [+0.0, +4.4] [a](b) <b>& $x$ ~~y~~ a\nb\x1b[0m\u202ec"
    cell = r"ddp_loop \_a\_ \*b\* [+0.0, +4.4] [a]\(b) &lt;b&gt;&amp; \$x\$ \~\~y\~\~ a b [0m c"
    assert markdown_cell(text) == cell
    assert markdown_cell("x" * 200) == "x" * 159 + "…"


def test_the_reports_show_the_values(comparison):
    markdown, text = texts(comparison)
    statistics = comparison["statistics"]
    shown = [f"{100 * statistics[f'accuracy_{side}'][limit]:.1f}%" for side in "ab" for limit in ("low", "high")]
    rows = sorted(comparison["disagreements"], key=lambda row: -np.abs(np.subtract(*row["probabilities"])).max())[:40]
    shown += [f"row {row['row']} · true class {row['label'][:20]}" for row in rows]
    shown += [f"{100 * max(of_run):.1f}%" for row in rows for of_run in row["probabilities"]]
    assert [value for value in shown if value not in text] == []
    section = text.partition("largest difference first")[2].partition("Misclassified")[0]
    assert re.findall(r"row (\d+) ", section) == [str(row["row"]) for row in rows]
    assert "learning_rate" in text.partition("Settings that differ")[2]
    for page in (markdown, text):
        page = page.replace("&lt;", "<").replace("&gt;", ">")
        assert "F1 (class <script>document" in page
        cause = f"threads 1 and 2, learning_rate 0.5 and 0.001, code {SCRIPT} and 1; start both with --threads 1"
        assert f"Different from step 1 on: {cause}" in page
        assert "step 1: the loss is " in page


def test_scores_of_different_classes_have_no_difference(make_pair):
    runs = make_pair(same=True)
    runs[1].metrics["positive_class"] = 0
    comparison = compare_runs(*runs, baselines=False)
    table = {row["name"]: (row["cells"], row["difference"]) for row in metric_rows(comparison, SCORES)}
    assert table["F1 (class 1) and F1 (class 0)"] == (["0.5000", "0.5000"], "–")
    assert table["test loss"] == (["0.4000", "0.4000"], "=")
    assert "F1 (class 1) and F1 (class 0) 0.5000 0.5000 –" in texts(comparison)[1], "both are shown"


def test_identical_runs_list_the_reviews_that_both_misclassify(make_pair, hostile):
    a, b = {"output_dir": "a", "bf16": True}, {"output_dir": "b"}  # these do not describe the training
    identical = compare_runs(*make_pair(reviews=hostile, same=True, a=a, b=b), baselines=False)
    markdown, text = as_markdown(identical), text_of(as_html(identical))
    total, numbers = identical["n_misclassified_by_both"], [row["row"] for row in identical["misclassified_by_both"]]
    assert total > len(numbers) == 20
    assert not re.search("rained differently|Settings that differ|p = |−|Correct only in", text + markdown)
    interval = "{low:.1%} – {high:.1%}".format(**identical["statistics"]["accuracy_a"])
    assert (text.count("interval"), text.count(interval), markdown.count(interval)) == (1, 1, 1)
    section = markdown.partition("Misclassified by both, most confident first")[2]
    assert section.startswith(f": 5 of {total}\n")
    assert [int(row.split("|")[1]) for row in rows_of(section)] == numbers[:5]
    section = text.partition("Misclassified by both, most confident first")[2]
    assert [int(number) for number in re.findall(r"row (\d+) ", section)] == numbers
    without = identical | {"misclassified_by_both": [], "n_misclassified_by_both": 0}
    assert "Misclassified by both" not in as_markdown(without)
    assert "classified correctly by at least one run" in as_html(without)


HASHES = {
    ("d", "d"): "hash(: )?d (- )?rows",
    ("d", None): "hash(: )?d (and )?not recorded: an earlier version wrote the run",
    ("d", "e"): "Only the evaluations during training differ, .*hash(: )?d (and )?e",
}


@pytest.mark.parametrize(("hashes", "shown"), HASHES.items())
def test_the_reports_show_the_hashes_and_why_there_are_no_baselines(make_pair, tmp_path, hashes, shown):
    a, b = make_pair(same=True)
    a.metrics["hash"], b.metrics["hash"] = hashes
    b.evaluations.clear()
    (tmp_path / "reviews.csv").unlink()
    for page in texts(compare_runs(a, b)):
        assert re.search(shown, page)
        assert "reviews.csv: no such file" in page


def test_the_reports_have_a_section_over_seeds(make_pair, review_csv):
    reviews = review_csv()
    pairs = [make_pair(same=seed == 1, reviews=reviews, seed=seed) for seed in (1, 2)]
    comparison = compare_seeds(pairs)
    for page in texts(comparison):
        assert "Over 2 seeds" in page
        assert "Bitwise identical for 1 of 2 seeds" in page
        assert page.count(comparison["verdict"]) == 1
    assert f"{comparison['seeds']['paired_seeds']['mean_a']:.4f}" in texts(comparison)[0]
    for page in texts(compare_seeds(pairs[:1], baselines=False)):
        assert page.count("Bitwise identical training") == 1


def test_three_files_are_written_which_are_the_same_each_time(comparison, tmp_path):
    write_comparison(comparison, tmp_path)
    written = {path.name: path.read_text("utf-8") for path in tmp_path.glob("comparison.*")}
    assert json.loads(written.pop("comparison.json")) == comparison
    assert written == {"comparison.html": as_html(comparison), "comparison.md": as_markdown(comparison)}


# ---- the plots -------------------------------------------------------------------------------------------------------


def plots_of(comparison, *losses: list[float]) -> list[ElementTree.Element]:
    """Return the plots of the page: the losses, and their difference. Other losses may replace those of the runs."""
    page = as_html(comparison | {"losses": losses or comparison["losses"]})
    plots = re.findall("<svg.*?</svg>", page, re.DOTALL)
    assert max(map(len, plots)) < 300_000
    declared = '<svg xmlns:xlink="http://www.w3.org/1999/xlink" '
    return [ElementTree.fromstring(svg.replace("<svg ", declared, 1)) for svg in plots]


def test_an_id_belongs_to_one_element_of_the_page_and_references_stay_in_their_plot(comparison):
    ids = []
    for plot in plots_of(comparison):
        drawn = [element.attrib for element in plot.iter() if element is not plot]  # the label may contain anything
        own = [attributes["id"] for attributes in drawn if "id" in attributes]
        values = " ".join(value for attributes in drawn for value in attributes.values())
        assert {*re.findall(r"#([\w-]+)", values)} <= {*own}
        ids += own
    assert len(ids) == len(set(ids)) > 0, "two elements with the same id would use each other's clip paths and markers"


def test_identical_steps_are_counted(comparison):
    difference = plots_of(comparison, [0.7, 0.5, 0.4, 0.3], [0.7, 0.5, 0.45, 0.3])[1]
    assert "bitwise identical: 3 of 4 steps" in [element.text for element in difference.iter("text")]


def test_unusual_losses_can_be_plotted(comparison):
    for losses in (
        ([0.7], [0.7]),
        ([0.7, 0.5, 0.3], [0.7]),
        ([math.nan, 0.5], [0.5, math.nan]),
        ([math.inf, 0.5], [0.5, 0.5]),
        ([1e-300, 0.5], [0.0, -0.5]),
        np.random.default_rng(0).uniform(size=(2, 200_000)).tolist(),  # the plots of a long training are small
    ):
        assert len(plots_of(comparison, *losses)) == 2
