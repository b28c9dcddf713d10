"""Run the commands of docs/figures.yaml, and write what they print into the pages. figures.sh starts it.

A page shows a value between two comments, which are invisible when it is rendered: `<!-- ID.VALUE -->…<!-- / -->`. They
may also enclose a block of code; the value is then its content.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import MISSING, fields
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from app.cli import options_of
from app.common.cores import usable_cores
from app.common.formats import markdown_table
from app.common.machine import cpu_name
from app.common.paths import DOWNLOADED_CSV
from app.settings import GROUPS, help_of

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FIGURES = DOCS / "figures.yaml"
GENERATED = "This page is generated: `bash run_scripts/figures.sh --pages` writes it again."
# The comments around a value, and the fence inside them if the value is a block of code.
MARKED = re.compile(r"(<!-- ([\w-]+)\.([\w-]+) -->(?:\n+```\w*\n|\n)?)(.*?)((?:\n```\n+|\n)?<!-- / -->)", re.DOTALL)
UNMEASURED = "…"

Figure = dict[str, Any]  # an entry of figures.yaml


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ids", nargs="*", metavar="ID")
    parser.add_argument("--pages", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    figures = read_figures()
    if unknown := {*options.ids} - {*figures}:
        print(f"figures.sh: {', '.join(sorted(unknown))}: not in {FIGURES.name}", file=sys.stderr)
        return 2
    if not options.pages and not DOWNLOADED_CSV.exists():
        print("figures.sh: no real reviews: run python -m app.data.download, or set CHNSENTICORP_CSV", file=sys.stderr)
        return 2
    chosen = {name: figures[name] for name in options.ids or figures}
    if options.check:
        return check(chosen)
    for name, figure in chosen.items() if not options.pages else ():
        record(name, *measure(name, figure))
    figures = read_figures()
    for page in pages():
        page.write_text(filled(page.read_text("utf-8"), figures), encoding="utf-8")
    (DOCS / "results.md").write_text(results_page(), encoding="utf-8")
    (DOCS / "settings.md").write_text(settings_page(), encoding="utf-8")
    return 0


def check(figures: dict[str, Figure]) -> int:
    """Measure the figures that don't depend on load, and return 1 if one of them has changed."""
    wrong = 0
    for name, figure in figures.items():
        if figure.get("varies_with") == "load":
            continue
        measured, _ = measure(name, figure)
        for value, text in measured.items():
            if text != (expected := figure["values"][value].get("text")):
                is_wrong = figure.get("varies_with") != "cpu" or figure.get("cpu") == cpu()
                wrong += is_wrong
                print(f"{name}.{value}: {text}, not {expected}{'' if is_wrong else f', on {cpu()}'}", flush=True)
    print(f"{wrong} value(s) of figures.yaml differ")
    return int(wrong > 0)


def measure(name: str, figure: Figure) -> tuple[dict[str, str], float]:
    """Run a figure's command; return what it printed for each value, and the seconds that it took."""
    print(f"{name}: {figure['command']}", flush=True)
    began = time.monotonic()
    shell = ["bash", "-euo", "pipefail", "-c", figure["command"]]
    done = subprocess.run(shell, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"figures.sh: {name}: exit status {done.returncode}\n{done.stdout}")
    texts = {}
    for value, options in figure["values"].items():
        if (found := re.search(options["find"], done.stdout, re.MULTILINE)) is None:
            raise SystemExit(f"figures.sh: {name}.{value}: {options['find']} is not in the output:\n{done.stdout}")
        text = found[1].rstrip("\n")
        texts[value] = options["as"].format(float(text.replace(",", ""))) if "as" in options else text
    return texts, time.monotonic() - began


def commit() -> str:
    """Return the commit of the code that is run, with `+` if it has changed since."""
    last = subprocess.check_output(["git", "log", "-1", "--abbrev=10", "--format=%h", "--", "app"], cwd=ROOT, text=True)
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "app"], cwd=ROOT, check=False).returncode
    return last.strip() + "+" * (changed != 0)


def cpu() -> str:
    return f"{cpu_name()}, {len(usable_cores())} cores"


# ---- figures.yaml and the pages --------------------------------------------------------------------------------------


def read_pages_of_figures() -> dict[str, dict[str, Figure]]:
    """Return the figures by the page that uses them first, and by their IDs."""
    content = yaml.safe_load(FIGURES.read_text("utf-8"))
    return {page: figures or {} for page, figures in content.items()}


def read_figures() -> dict[str, Figure]:
    return {name: figure for figures in read_pages_of_figures().values() for name, figure in figures.items()}


def record(name: str, texts: dict[str, str], seconds: float) -> None:
    """Write what has been measured into figures.yaml, which may have been edited meanwhile."""
    comment = "".join(re.findall(r"^#.*\n", FIGURES.read_text("utf-8"), re.MULTILINE))
    content = read_pages_of_figures()
    figure = next(figures[name] for figures in content.values() if name in figures)
    for value, text in texts.items():
        figure["values"][value]["text"] = text
    figure |= {"commit": commit(), "date": f"{date.today()}", "cpu": cpu(), "seconds": round(seconds)}
    text = yaml.dump(content, Dumper=Dumper, allow_unicode=True, sort_keys=False, width=118)
    FIGURES.write_text(comment + re.sub(r"^(?=\S)", "\n", text, flags=re.MULTILINE), encoding="utf-8")


class Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are."""


Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def pages() -> Iterator[Path]:
    """Yield the pages that people write."""
    for page in [*ROOT.glob("*.md"), *DOCS.glob("*.md")]:
        if page.name not in ("results.md", "settings.md"):
            yield page


def filled(text: str, figures: dict[str, Figure]) -> str:
    """Return a page with the values of the figures between their comments."""

    def value_of(found: re.Match[str]) -> str:
        before, name, value, _, after = found.groups()
        if value not in figures.get(name, {}).get("values", ()):
            raise SystemExit(f"figures.sh: <!-- {name}.{value} -->: not in {FIGURES.name}")
        return before + text_of(figures[name]["values"][value]) + after

    return MARKED.sub(value_of, text)


def text_of(value: dict[str, str]) -> str:
    return value.get("text", UNMEASURED)


# ---- the generated pages ---------------------------------------------------------------------------------------------


def results_page() -> str:
    """Return results.md: every figure with its command."""
    parts = [f"# Results\n\n{GENERATED} Each command prints its figures, and `docs/figures.yaml` says where.\n"]
    for page, figures in read_pages_of_figures().items():
        if figures:
            parts.append(f"## [{Path(page).name}]({page})\n")
            rows = [result_row(figure) for figure in figures.values()]
            parts.append(markdown_table(["what", "result", "command", "measured"], rows, text_columns=4))
    return "\n".join(parts)


def result_row(figure: Figure) -> list[str]:
    """Return a figure's row of the table. Values of several lines are only in the page that uses them."""
    values = {name: text_of(value) for name, value in figure["values"].items() if "\n" not in text_of(value)}
    named = [f"{name.replace('_', ' ')}: {text}" if len(values) > 1 else text for name, text in values.items()]
    measured = ", ".join(figure[key] for key in ("date", "commit", "cpu") if key in figure)
    command = " ".join(figure["command"].split())
    return [figure["what"], "; ".join(named), f"`{command.replace('|', chr(92) + '|')}`", measured]


def settings_page() -> str:
    """Return settings.md: all settings, by group."""
    parts = [f"# Settings\n\n{GENERATED} `--help` prints the same, and which of them a program has.\n"]
    for group in GROUPS:
        rows = [setting_row(field.name, field.default) for field in fields(group)]
        title = str(group.__doc__)
        parts.append(f"## {title[0].upper()}{title[1:]}\n")
        parts.append(markdown_table(["setting", "default", "meaning"], rows, text_columns=3))
    return "\n".join(parts)


def setting_row(name: str, default: object) -> list[str]:
    """Return a setting's row of the table. A default that is not a constant is part of the help text."""
    text, _, described = help_of(name).partition("; default: ")
    choices = options_of(name).get("metavar", "")
    if choices.startswith("{"):
        text += f"; one of {', '.join(f'`{choice}`' for choice in choices.strip('{}').split(','))}"
    shown = "" if default in (None, MISSING) else f"`{str(default).lower() if isinstance(default, bool) else default}`"
    return [f"`--{name}`", described or shown, text.replace("|", r"\|").replace("*", r"\*")]


if __name__ == "__main__":
    sys.exit(main())
