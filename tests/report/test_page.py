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

import pytest
from helpers.jobs import unavailable
from report.conftest import SCRIPT

from app.report.comparison import compare_seeds
from app.report.render import write_comparison

pytestmark = pytest.mark.launched
FLAGS = [
    *("--headless", "--dump-dom", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--allow-file-access-from-files", "--virtual-time-budget=3000"),
]
# Measures an unchanged page from outside, in a frame as wide as a phone.
FRAME = """<!doctype html><iframe src="{page}" style="border: 0; width: {width}px; height: 800px"></iframe><script>
onload = () => {{
  const inside = document.querySelector("iframe").contentDocument, root = inside.documentElement;
  const boxed = element => element.closest(".scroll") && !element.matches(".scroll");
  const beyond = [...inside.querySelectorAll("body *")].filter(element => !boxed(element)
    && element.getBoundingClientRect().right > root.clientWidth + 0.5);
  const lines = word => {{
    const range = inside.createRange();
    range.setStart(word.node, word.index);
    range.setEnd(word.node, word.index + word[0].length);
    return range.getClientRects().length;
  }};
  const inHeads = [...inside.querySelectorAll("th, th *")].flatMap(element => [...element.childNodes]);
  const words = inHeads.filter(node => node.data).flatMap(
    node => [...node.data.matchAll(/[^\\s/-]+/g)].map(word => Object.assign(word, {{node}})));
  document.title = JSON.stringify({{
    title: inside.title,
    width: root.scrollWidth,
    figures: inside.querySelectorAll("svg").length,
    heads: words.length,
    broken: words.filter(word => lines(word) > 1).map(word => word[0]),
    beyond: beyond.map(element => element.outerHTML.slice(0, 90)),
  }});
}};
</script>"""


@pytest.fixture
def chromium(tmp_path: Path) -> Callable[..., str]:
    """A function that opens a page, and returns what it then contains."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        unavailable("no Chromium: install the package chromium")

    def open_page(page: Path, *flags: str) -> str:
        profile = tmp_path / f"profile{len(list(tmp_path.iterdir()))}"
        command = [program, *FLAGS, *flags, f"--user-data-dir={profile}", page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    return open_page


@pytest.fixture
def measure(chromium, tmp_path) -> Callable[..., dict[str, Any]]:
    """A function that measures a page: its title, its width, and the elements that overflow at the right."""

    def at(page: Path, width: int = 390) -> dict[str, Any]:
        frame = tmp_path / "frame.html"
        frame.write_text(FRAME.format(page=page.as_uri(), width=width), "utf-8")
        (title,) = re.findall(r"<title>(.*?)</title>", chromium(frame), re.DOTALL)
        return dict(json.loads(html.unescape(title)))

    return at


@pytest.fixture
def page(make_pair, hostile, tmp_path) -> Path:
    """A comparison of two different runs over seeds, with text that tries to run scripts and to overflow the page."""
    a = {"path": SCRIPT, "model": "m" * 200, "devices": ["cpu"] * 64, "learning_rate": 0.5}
    write_comparison(compare_seeds([make_pair(reviews=hostile, a=a, seed=seed) for seed in (1, 2)]), tmp_path)
    return tmp_path / "comparison.html"


def edited(page: Path, name: str, change: Callable[[str], str]) -> Path:
    other = page.with_name(name)
    other.write_text(change(page.read_text("utf-8")), "utf-8")
    return other


def without_policy(text: str) -> str:
    return re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", text)


def test_no_script_runs(page, measure):
    # Each protection works alone: escaping without the policy, and the policy without escaping.
    assert measure(edited(page, "escaped.html", without_policy))["title"].startswith(SCRIPT)
    unescaped = edited(page, "unescaped.html", lambda text: re.sub("<title>.*?</title>", "", html.unescape(text)))
    assert measure(unescaped)["title"] == ""
    assert measure(edited(unescaped, "neither.html", without_policy))["title"] == "ran", (
        "otherwise this test cannot fail"
    )


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_overflows_and_no_head_of_a_table_is_broken_inside_a_word(page, measure, width):
    seen = measure(page, width)
    assert seen["figures"] == 2
    assert seen["heads"] > 50
    assert seen["broken"] == []
    assert seen["beyond"] == []
    assert seen["width"] == width
    wide = edited(page, "wide.html", lambda text: text.replace("<main>", '<main><div style="width: 2000px">wide</div>'))
    assert measure(wide, width)["beyond"], "otherwise this test cannot fail"
    narrow = edited(
        page,
        "narrow.html",
        lambda text: text.replace("</style>", "th { max-width: 9px; word-break: break-all }</style>"),
    )
    assert measure(narrow, width)["broken"], "otherwise this test cannot fail"


@pytest.mark.slow
def test_no_request_leaves_the_page(page, chromium, tmp_path):
    def requested(opened: Path) -> set[str]:
        """Return the requests of the page. The browser's own requests have no initiator."""
        log = tmp_path / f"{opened.stem}.json"
        chromium(opened, f"--log-net-log={log}")
        events = [event.get("params", {}) for event in json.loads(log.read_text("utf-8"))["events"]]
        asked = {event["url"] for event in events if event.get("initiator", "not an origin") != "not an origin"}
        looked_up = {event["host"] for event in events if "host" in event and "file:" in str(event)}
        return asked | looked_up

    picture = '<img src="http://canary.invalid/">'
    canary = edited(page, "canary.html", lambda text: without_policy(text).replace("<main>", f"<main>{picture}"))
    assert "http://canary.invalid/" in requested(canary), "otherwise this test cannot fail"
    assert requested(page) == set()
    let_through = edited(page, "let_through.html", lambda text: text.replace("<main>", f"<main>{picture}"))
    assert requested(let_through) == set(), "the policy holds even if the template does not escape"
