"""comparison.html in a real browser: no script runs, and nothing overflows on a phone.

test_render.py finds nothing in it that sends a request.
"""

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
  document.title = JSON.stringify({{
    title: inside.title,
    width: root.scrollWidth,
    figures: inside.querySelectorAll("svg").length,
    beyond: beyond.map(element => element.outerHTML.slice(0, 90)),
  }});
}};
</script>"""


@pytest.fixture
def measure(tmp_path) -> Callable[..., dict[str, Any]]:
    """A function that measures a page: its title, its width, and the elements that overflow at the right."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        unavailable("no Chromium: install the package chromium")

    def at(page: Path, width: int = 390) -> dict[str, Any]:
        frame, profile = tmp_path / "frame.html", tmp_path / f"profile{len(list(tmp_path.iterdir()))}"
        frame.write_text(FRAME.format(page=page.as_uri(), width=width), "utf-8")
        command = [program, *FLAGS, f"--user-data-dir={profile}", frame.as_uri()]
        opened = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        (title,) = re.findall(r"<title>(.*?)</title>", opened, re.DOTALL)
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
def test_nothing_overflows(page, measure, width):
    seen = measure(page, width)
    assert seen["figures"] == 2
    assert seen["beyond"] == []
    assert seen["width"] == width
    wide = edited(page, "wide.html", lambda text: text.replace("<main>", '<main><div style="width: 2000px">wide</div>'))
    assert measure(wide, width)["beyond"], "otherwise this test cannot fail"
