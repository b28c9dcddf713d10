"""comparison.md and comparison.html show what comparison.json contains; untrusted text stays text in both."""

from __future__ import annotations

import json
import re

import pandas as pd
import pytest
from helpers.html_page import Page
from helpers.run_folders import edit_json, write_run

from app.common.formats import markdown_cell
from app.report.comparison import compare_runs, compare_seeds
from app.report.explanation import differing_settings
from app.report.render import as_html, as_markdown, write_comparison
from app.runs.reader import read_run

SCRIPT = "<script>document.title='ran'</script>"
IMAGE = "<img src=x onerror=\"document.title='ran'\">"


@pytest.fixture
def comparison(review_csv, tmp_path):
    """Two different runs on reviews and classes that contain active HTML."""
    reviews = pd.read_csv(review_csv(120))
    reviews["review"] += f" {SCRIPT}{IMAGE} | `code` [link](http://example.invalid) \x1b[31m"
    reviews["label"] = reviews["label"].map({0: SCRIPT, 1: IMAGE})
    reviews.to_csv(tmp_path / "reviews.csv", index=False)
    a, b = (write_run(tmp_path / n, tmp_path / "reviews.csv", rng_seed=c) for n, c in (("a", 0), ("b", 1)))
    edit_json(a / "settings.json", learning_rate=0.5, path=f"{SCRIPT}$\\frac{{$")
    return compare_runs(read_run(a), read_run(b))


def test_the_page_has_no_scripts_and_no_requests(comparison):
    assert comparison["disagreements"]
    page = Page(as_html(comparison))
    assert not {"script", "img", "iframe", "object", "embed", "link", "form", "base"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    addresses = [value for name, value in page.attributes if name in ("src", "href", "xlink:href", "action", "data")]
    assert all(address.startswith("#") for address in addresses)
    policies = [value for name, value in page.attributes if name == "content" and "default-src 'none'" in value]
    assert len(policies) == 1
    assert "script" not in policies[0], "what default-src forbids stays forbidden"
    assert not re.search(r"url\((?!#)|@import", as_html(comparison))


def test_the_page_shows_hostile_text_literally(comparison):
    text = Page(as_html(comparison)).text
    assert SCRIPT in text
    assert IMAGE in text
    assert "$\\frac{$" in text


def test_markdown_escapes_hostile_text(comparison):
    markdown = as_markdown(comparison)
    assert "<" not in markdown
    assert "\x1b" not in markdown
    assert "](http" not in markdown
    rows = [line for line in markdown.splitlines() if "onerror" in line and line.startswith("| ") and "http" in line]
    assert rows
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 6 for row in rows)


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("ddp_loop", "ddp_loop"),
        ("_a_ *b*", r"\_a\_ \*b\*"),
        ("[+0.0, +4.4]", "[+0.0, +4.4]"),
        ("[a](b)", r"[a]\(b)"),
        ("a\nb\x1b[0m\u202ec", "a b [0m c"),
        ("<b>&", "&lt;b&gt;&amp;"),
        ("$x$ ~~y~~", r"\$x\$ \~\~y\~\~"),
        ("x" * 200, "x" * 159 + "…"),
    ],
)
def test_a_markdown_cell_is_one_line_without_markup(text, cell):
    assert markdown_cell(text) == cell


def test_the_page_shows_the_values(comparison):
    text = Page(as_html(comparison)).text
    assert comparison["verdict"].split(":")[0].lower() in text.lower()
    assert comparison["first_difference"] in text
    statistics = comparison["statistics"]
    for side in "ab":
        assert f"{100 * statistics[f'accuracy_{side}']['low']:.1f}%" in text
    for item in comparison["disagreements"][:40]:
        assert f"row {item['row']} " in text
        for of_run in item["probabilities"]:
            assert f"{100 * max(of_run):.1f}%" in text
    assert "learning_rate" in text


def test_only_settings_that_describe_the_training_and_differ_are_listed(comparison):
    older, newer = comparison["settings"]
    older |= {"model_config": {"act": "gelu", "layers": 2}}
    newer |= {"model_config": {"act": "relu", "layers": 2}}
    listed = differing_settings(older | {"bf16": False, "output_dir": "x"}, newer | {"output_dir": "y", "new": 1})
    assert listed == {"learning_rate": (0.5, 1e-3), "model_config.act": ("gelu", "relu")}
    section = Page(as_html(comparison)).text.partition("Settings that differ")[2]
    assert "learning_rate" in section
    assert "max_length" not in section


def test_both_reports_explain_why_there_are_no_baselines(comparison):
    without = comparison | {"floors": None, "why_no_floors": "reviews.csv: no such file"}
    assert "reviews.csv: no such file" in as_html(without)
    assert "reviews.csv: no such file" in as_markdown(without)


def test_both_reports_have_a_section_over_seeds(review_csv, tmp_path):
    pairs = []
    for seed in (1, 2):
        runs = [write_run(tmp_path / f"{x}{seed}", review_csv(), rng_seed=i, seed=seed) for i, x in enumerate("ab")]
        pairs.append(tuple(map(read_run, runs)))
    comparison = compare_seeds(pairs)
    markdown, text = as_markdown(comparison), Page(as_html(comparison)).text
    for page in (markdown, text):
        assert "Over 2 seeds" in page
        assert "Bitwise identical for 0 of 2 seeds" in page
    assert f"{comparison['seeds']['paired_seeds']['mean_a']:.4f}" in markdown
    tables = [
        line.count("|") for line in markdown.splitlines() if line.startswith(("| seed", "|---:|---:|---:|", "| mean"))
    ]
    assert tables == [7, 7, 7], "two runs, the first differing step and two baselines"
    assert "\n| 2 | 0." in markdown
    assert "\na - TF-IDF" in markdown.replace("A (ddp_loop)", "a")
    assert "compared with TF-IDF" in text
    without = compare_seeds(pairs, baselines=False)
    assert "TF-IDF" not in as_markdown(without)
    assert "none (not computed because of --no_baselines)" in as_markdown(without)
    assert "compared with" not in Page(as_html(without)).text
    one = compare_seeds(pairs[:1])
    assert "Over 1 seed<" in as_html(one)
    assert "undecided" in as_markdown(one).lower() or "indistinguishable" in as_markdown(one).lower()


def test_three_files_are_written(comparison, tmp_path):
    (tmp_path / "out").mkdir()
    markdown = write_comparison(comparison, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "comparison.html",
        "comparison.json",
        "comparison.md",
    ]
    assert (tmp_path / "out" / "comparison.md").read_text("utf-8") == markdown
    assert json.loads((tmp_path / "out" / "comparison.json").read_text("utf-8")) == comparison


@pytest.fixture
def identical(review_csv, tmp_path):
    """Two identical runs that misclassify more reviews than are listed, on reviews that contain active HTML."""
    reviews = pd.read_csv(review_csv(2_000))
    reviews["review"] += f" {SCRIPT}|{IMAGE}"
    reviews.to_csv(tmp_path / "reviews.csv", index=False)
    return compare_runs(*(read_run(write_run(tmp_path / name, tmp_path / "reviews.csv")) for name in "ab"))


def misclassified_section(text: str) -> str:
    return text.partition("Misclassified by both, most confident first")[2].partition("Settings")[0]


def test_identical_runs_list_the_reviews_that_both_misclassify(identical):
    total = identical["n_misclassified_by_both"]
    markdown, page = as_markdown(identical), as_html(identical)
    assert "classified differently" not in markdown
    section = misclassified_section(markdown)
    assert section.startswith(f": 5 of {total}\n")
    rows = [line for line in section.splitlines() if re.match(r"\| \d", line)]
    assert [int(line.split("|")[1]) for line in rows] == [row["row"] for row in identical["misclassified_by_both"][:5]]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 6 for row in rows)
    shown = misclassified_section(Page(page).text)
    assert [int(number) for number in re.findall(r"row (\d+) ", shown)] == [
        row["row"] for row in identical["misclassified_by_both"]
    ]
    assert f"20 of {total}." in shown
    assert shown.count(SCRIPT) == 20, "as text"
    assert "script" not in Page(page).tags


def test_runs_without_common_mistakes_say_so(identical):
    without = identical | {"misclassified_by_both": [], "n_misclassified_by_both": 0}
    assert "Misclassified by both" not in as_markdown(without)
    assert "classified correctly by at least one run" in as_html(without)
