"""comparison.html in a real browser: nothing overflows, on a phone and on a wide screen.

test_render.py finds nothing in it that runs a script or sends a request.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest
from helpers.jobs import unavailable
from report.conftest import SCRIPT

from app.report.comparison import compare_seeds
from app.report.render import write_comparison

FLAGS = [
    *("--headless", "--dump-dom", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--allow-file-access-from-files", "--virtual-time-budget=3000"),
]
# Measures an unchanged page from outside, in a frame: what overflows at the right.
FRAME = """<!doctype html><iframe src="{page}" style="border: 0; width: {width}px; height: 800px"></iframe><script>
onload = () => {{
  const inside = document.querySelector("iframe").contentDocument, root = inside.documentElement;
  const boxed = element => element.closest(".scroll") && !element.matches(".scroll");
  const beyond = [...inside.querySelectorAll("body *")].filter(element => !boxed(element)
    && element.getBoundingClientRect().right > root.clientWidth + 0.5);
  document.title = JSON.stringify({{
    width: root.scrollWidth,
    figures: inside.querySelectorAll("svg").length,
    beyond: beyond.map(element => element.outerHTML.slice(0, 90)),
  }});
}};
</script>"""


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_overflows(make_pair, hostile, tmp_path, width):
    """Neither long texts, nor many devices, in the comparison of two different runs over seeds."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None) or unavailable("no Chromium: install chromium")
    a = {"path": SCRIPT, "model": "m" * 200, "devices": ["cpu"] * 64, "learning_rate": 0.5}
    write_comparison(compare_seeds([make_pair(reviews=hostile, a=a, seed=seed) for seed in (1, 2)]), tmp_path)

    def measure(page):
        frame = tmp_path / "frame.html"
        frame.write_text(FRAME.format(page=page.as_uri(), width=width), "utf-8")
        command = [program, *FLAGS, f"--user-data-dir={tmp_path / page.stem}", frame.as_uri()]
        opened = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        (title,) = re.findall(r"<title>(.*?)</title>", opened, re.DOTALL)
        return json.loads(html.unescape(title))

    page, wide = tmp_path / "comparison.html", tmp_path / "wide.html"
    assert measure(page) == {"width": width, "figures": 2, "beyond": []}
    text = page.read_text("utf-8")
    wide.write_text(text.replace("<main>", '<main><div style="width: 2000px">wide</div>'), "utf-8")
    assert measure(wide)["beyond"], "otherwise this test cannot fail"
