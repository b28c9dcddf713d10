"""What the laboratories share: times in alternating rounds, and tables in which untrusted text stays text."""

from __future__ import annotations

import json
import time
from functools import partial

import pandas as pd
import pytest

from app.bench.core import MOST_CALLS, Page, alternate, compared

HOSTILE = "<script>document.title='ran'</script><img src=x onerror=alert(1)> \x1b[31m{{ 7 * 7 }}"


def write_page(folder, text: str = "explained") -> Page:
    page = Page("Title", {"ranks": "2 on 1 node(s)", text: text}, folder)
    page.section("example", f"Example {text}", f"One. {text}")
    index = pd.Index(["first", f"row {text}"], name=f"what {text}")
    page.table("times", pd.DataFrame({f"ms {text}": [1.5, 22.0], "long": ["x" * 70, text]}, index), f"a note {text}")
    page.numbers["value"] = 1
    page.write("lab")
    return page


def test_tables_are_printed_and_written(tmp_path, capsys):
    write_page(tmp_path)
    text = (tmp_path / "lab.md").read_text("utf-8")
    assert text.rstrip() in capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert rows == [
        ["what explained", "ms explained", "long"],
        ["---", "---:", "---:"],
        ["first", "1.500", "x" * 70],
        ["row explained", "22.000", "explained"],
    ]
    content = json.loads((tmp_path / "lab.json").read_text())
    assert content["sections"] == {"example": {"value": 1}}
    assert content["machine"]["ranks"] == "2 on 1 node(s)"


def test_untrusted_text_is_escaped(tmp_path):
    write_page(tmp_path, HOSTILE)
    text = (tmp_path / "lab.md").read_text("utf-8")
    assert all(line.isprintable() for line in text.splitlines())
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 6


def test_a_rank_without_a_folder_shows_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert write_page(None).sections == {"example": {"value": 1}}
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_calls_are_timed_in_rounds_whose_order_alternates(world, monkeypatch):
    now, called = 0.0, []

    def take(name, seconds):
        nonlocal now
        now += seconds
        called.append(name)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    times = alternate({"a": partial(take, "a", 0.25), "b": partial(take, "b", 0.5)}, 1.0, world)
    # Once without being timed, once for the estimate, and then 1 s for 0.25 + 0.5 s: the fewest rounds.
    assert "".join(called) == "ab" + "ab" + "ab" + "ba" + "ab"
    assert times.to_dict("list") == {"a": [0.25] * 3, "b": [0.5] * 3}
    called.clear()
    times = alternate({("short", 1): partial(take, "s", 2**-20)}, 1.0, world)
    assert (len(times), len(called)) == (7, 2 + 7 * MOST_CALLS)
    assert times["short", 1].tolist() == pytest.approx([2**-20] * 7)


def test_ratios_are_those_of_the_same_round():
    frame = compared(pd.DataFrame({"a": [1.0, 2.0, 4.0], "b": [3.0, 4.0, 4.0]}))
    assert frame.loc["b"].tolist() == ["4 s", 2.0, 1.0, 3.0]
    assert frame.loc["a"].tolist() == ["2 s", 1.0, 1.0, 1.0]
