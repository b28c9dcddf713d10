"""comparison.html in a real browser: no script runs, nothing overflows on a phone, no request leaves the page."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from jobs import unavailable
from run_folders import edit_json, write_run

from app.report.comparison import compare_seeds
from app.report.render import write_comparison
from app.runs.reader import read_run

pytestmark = pytest.mark.launched
SCRIPT = "<script>document.title='ran'</script>"
IMAGE = "<img src=x onerror=\"document.title='ran'\">"
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--allow-file-access-from-files", "--virtual-time-budget=3000"),
]
# Looks at a page from outside, in a frame as wide as a phone, so that the page itself is opened as it is.
GLASS = """<!doctype html><iframe src="{page}" style="border: 0; width: {width}px; height: 800px"></iframe><script>
onload = () => {{
  const inside = document.querySelector("iframe").contentDocument, root = inside.documentElement;
  const boxed = element => element.closest(".scroll") && !element.matches(".scroll");
  const beyond = [...inside.querySelectorAll("body *")].filter(element => !boxed(element)
    && element.getBoundingClientRect().right > root.clientWidth + 0.5);
  document.title = JSON.stringify({{
    title: inside.title,
    width: root.scrollWidth,
    figures: inside.querySelectorAll("svg").length,
    background: getComputedStyle(inside.body).backgroundColor,
    beyond: beyond.map(element => element.outerHTML.slice(0, 90)),
  }});
}};
</script>"""


@pytest.fixture
def chromium(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        unavailable("no Chromium: install the package chromium")

    def start(page: Path, *flags: str) -> subprocess.CompletedProcess[str]:
        profile = tmp_path / f"profile{len(list(tmp_path.iterdir()))}"
        command = [program, *FLAGS, *flags, f"--user-data-dir={profile}", page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    return start


@pytest.fixture
def look(chromium, tmp_path) -> Callable[..., dict[str, Any]]:
    """`look(page, width)`: its title, the width that it takes, and what stands out at the right."""

    def at(page: Path, width: int = 390, *flags: str) -> dict[str, Any]:
        glass = tmp_path / "glass.html"
        glass.write_text(GLASS.format(page=page.as_uri(), width=width), "utf-8")
        (title,) = re.findall(r"<title>(.*?)</title>", chromium(glass, "--dump-dom", *flags).stdout, re.DOTALL)
        return dict(json.loads(html.unescape(title)))

    return at


@pytest.fixture
def page(review_csv, tmp_path) -> Path:
    """A comparison over seeds of two different runs, full of text that would run, break or overflow a page."""
    reviews = pd.read_csv(review_csv(160))
    reviews["review"] += f" {SCRIPT}{IMAGE} " + "好" * 300 + "w" * 300
    reviews["label"] = reviews["label"].map({0: SCRIPT, 1: IMAGE + "x" * 80})
    reviews.to_csv(tmp_path / "reviews.csv", index=False)
    pairs = []
    for seed in (1, 2):
        runs = [
            write_run(tmp_path / f"{x}{seed}", tmp_path / "reviews.csv", chance=i, seed=seed)
            for i, x in enumerate("ab")
        ]
        edit_json(runs[0] / "settings.json", path=SCRIPT, model="m" * 200, devices=["cpu"] * 64, learning_rate=0.5)
        pairs.append(tuple(map(read_run, runs)))
    (tmp_path / "out").mkdir()
    write_comparison(compare_seeds(pairs), tmp_path / "out")
    return tmp_path / "out" / "comparison.html"


def rewritten(page: Path, name: str, change: Callable[[str], str]) -> Path:
    other = page.with_name(name)
    other.write_text(change(page.read_text("utf-8")), "utf-8")
    return other


def without_policy(text: str) -> str:
    return re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", text)


def test_no_script_runs(page, look):
    assert look(page)["title"].startswith(SCRIPT)
    # Each of the two walls holds alone: what is escaped would not run without the policy, nor the other way round.
    assert look(rewritten(page, "escaped.html", without_policy))["title"].startswith(SCRIPT)
    unescaped = rewritten(page, "unescaped.html", lambda text: re.sub("<title>.*?</title>", "", html.unescape(text)))
    assert look(unescaped)["title"] == ""
    assert look(rewritten(unescaped, "neither.html", without_policy))["title"] == "ran", "else this test can't fail"


@pytest.mark.parametrize("width", [390, 320, 800, 1400])
def test_nothing_overflows(page, look, width):
    seen = look(page, width)
    assert seen["figures"] == 6
    assert seen["beyond"] == []
    assert seen["width"] == width
    wide = rewritten(
        page, "wide.html", lambda text: text.replace("<main>", '<main><div style="width: 2000px">wide</div>')
    )
    assert look(wide, width)["beyond"], "else this test can't fail"


def test_light_and_dark(page, look):
    shades = {look(page, 390, f"--blink-settings=preferredColorScheme={scheme}")["background"] for scheme in (0, 1)}
    assert shades == {"rgb(19, 20, 22)", "rgb(246, 245, 242)"}


def test_no_request_leaves_the_page(page, chromium, tmp_path):
    def requested(opened: Path) -> set[str]:
        """What the page asked for, not the browser, which has errands of its own: those have no initiator."""
        log = tmp_path / f"{opened.stem}.json"
        chromium(opened, "--dump-dom", f"--log-net-log={log}")
        events = [event.get("params", {}) for event in json.loads(log.read_text("utf-8"))["events"]]
        asked = {event["url"] for event in events if event.get("initiator", "not an origin") != "not an origin"}
        looked_up = {event["host"] for event in events if "host" in event and "file:" in str(event)}
        return asked | looked_up

    picture = '<img src="http://canary.invalid/">'
    canary = rewritten(page, "canary.html", lambda text: without_policy(text).replace("<main>", f"<main>{picture}"))
    assert "http://canary.invalid/" in requested(canary), "else this test can't fail"
    assert requested(page) == set()
    let_through = rewritten(page, "let_through.html", lambda text: text.replace("<main>", f"<main>{picture}"))
    assert requested(let_through) == set(), "the policy holds even where the template wouldn't"


def test_it_prints(page, chromium, tmp_path):
    chromium(page, f"--print-to-pdf={tmp_path / 'page.pdf'}", "--no-pdf-header-footer")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
