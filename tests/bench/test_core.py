"""What the laboratories share: times in alternating rounds, and tables in which untrusted text stays text."""

from __future__ import annotations

import json
import re
import time
from functools import partial

import pandas as pd
import pytest

from app.bench import speed
from app.bench.core import MOST_CALLS, Page, alternate

HOSTILE, ESCAPED = "<script>\x1b[31m {{ 7 * 7 }}", r"&lt;script&gt; [31m {{ 7 \* 7 }}"


def write_page(folder) -> Page:
    page = Page("Title", {"ranks": "2 on 1 node(s)", HOSTILE: HOSTILE}, folder)
    page.section("example", f"Example {HOSTILE}", f"One. {HOSTILE}")
    index = pd.Index(["first", f"row {HOSTILE}"], name=f"what {HOSTILE}")
    columns = {f"ms {HOSTILE}": [1.5, 22.0], "long": ["x" * 70, HOSTILE]}
    page.table("times", pd.DataFrame(columns, index), f"a note {HOSTILE}")
    page.numbers["value"] = 1
    page.write("lab")
    return page


def test_tables_of_untrusted_text_are_printed_and_written_by_the_rank_that_has_a_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert write_page(None).sections == {"example": {"value": 1}}
    assert (capsys.readouterr().out, list(tmp_path.iterdir())) == ("", [])
    write_page(tmp_path)
    text = (tmp_path / "lab.md").read_text("utf-8")
    assert text.rstrip() in capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert rows == [
        [f"what {ESCAPED}", f"ms {ESCAPED}", "long"],
        ["---", "---:", "---:"],
        ["first", "1.500", "x" * 70],
        [f"row {ESCAPED}", "22.000", ESCAPED],
    ]
    assert text.count(ESCAPED) == 9
    assert not re.search(r"<|\x1b", text)
    content = json.loads((tmp_path / "lab.json").read_text())
    assert content["sections"] == {"example": {"value": 1}}
    assert content["machine"]["ranks"] == "2 on 1 node(s)"


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
    times = alternate({"short": partial(take, "s", 2**-20)}, 1.0, world)
    assert (len(times), len(called)) == (7, 2 + 7 * MOST_CALLS)
    assert times["short"].tolist() == pytest.approx([2**-20] * 7)


def test_speed_padding_and_ratios_of_known_steps(tmp_path, capsys):
    # The mean length is 10 tokens. In the second round, the tutorial's reviews are longer than on average.
    measured = {
        (0, "ddp_loop"): {"examples": 40, "tokens": 400, "padded_tokens": 500, "seconds": 2.0},
        (0, "tutorial"): {"examples": 40, "tokens": 400, "padded_tokens": 800, "seconds": 4.0},
        (1, "ddp_loop"): {"examples": 40, "tokens": 320, "padded_tokens": 400, "seconds": 1.0},
        (1, "tutorial"): {"examples": 40, "tokens": 480, "padded_tokens": 800, "seconds": 6.0},
    }
    frame = pd.DataFrame.from_dict(measured, orient="index", dtype=float).rename_axis(["round", "job"])
    page = Page("Speed", {}, tmp_path)
    page.section("model", "model")
    speed.show(page, frame, ["ddp_loop", "tutorial"])
    lines = [line.replace(" ", "") for line in capsys.readouterr().out.splitlines()]
    # 200 and 320 tokens/s, in reviews of 10 tokens.
    assert "|ddp_loop|26.0|1.000|1.000|1.000|20.0%|" in lines
    assert "|tutorial|9.0|3.000|2.000|4.000|45.0%|" in lines
