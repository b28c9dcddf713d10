"""The pages: figures are those of docs/figures.yaml, and commands, links and files exist."""

from __future__ import annotations

import inspect
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path
from textwrap import indent

import pytest
from helpers.jobs import PROJECT
from launched.pages import BLOCK, commands_of

from app.__main__ import FLAGS_OF_TORCHRUN, OTHERS, WITH_RANKS
from app.cli import CommandLine
from run_scripts import figures

PAGES = sorted([*PROJECT.glob("*.md"), *PROJECT.glob("docs/*.md"), PROJECT / "data" / "README.md"])
NAMES = [str(page.relative_to(PROJECT)) for page in PAGES]
FIGURES = figures.read_figures()
SOURCES = [*PROJECT.glob("app/**/*.py"), *PROJECT.glob("tests/**/*.py"), *PROJECT.glob("run_scripts/**/*.*")]
STARTS = re.compile(  # a program of this project, by its module, by its script, or as `samebits NAME`
    r"\b(?:python|torchrun)\b.* -m app\.([\w.]+)|_scripts/(?:multi_node\.sh \S+|slurm\.sh) app\.([\w.]+)"
    r"|_scripts/(compare|ddp_loop|trainer_run)\.sh|\bsamebits (?!is |are )([a-z][\w.]+)"
)
MODULES = WITH_RANKS | OTHERS
OF_THE_LAUNCHER = re.compile(rf"--(?:nproc_per_node|{'|'.join(FLAGS_OF_TORCHRUN)})[= ]\S+")


def programs_of(command: str) -> list[tuple[str, list[str]]]:
    """The modules that a command starts, and their flags."""
    found = []
    for simple in re.split(r"&&|[;|()]|\bdo\b", re.sub(r"\$\{?\w+\}?|\$\(\w+[^)]*\)", "1", command)):
        if start := STARTS.search(simple):
            module, on_nodes, script, name = start.groups()
            rest = OF_THE_LAUNCHER.sub("", simple[start.end() :]) if name else simple[start.end() :]
            words = shlex.split(re.sub(r"\s\d?[<>&].*", "", rest), comments=True)
            found.append((module or on_nodes or script or MODULES[name], words))
    return found


def parse(name: str, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse the command line of a program. Raises UserError, as the program would."""
    module = import_module(f"app.{name}.__main__" if name == "plan" else f"app.{name}")
    monkeypatch.setattr(sys, "argv", [name, *flags])
    if name in ("experiments.faults", "data.download"):  # with few flags, which they parse where they run
        assert all(flag in inspect.getsource(module) for flag in flags if flag.startswith("--"))
    elif hasattr(module, "parse"):
        module.parse()
    else:
        plain = CommandLine(None, getattr(module, "add_arguments", lambda parser: None))
        getattr(module, "PROGRAM", plain).parse(flags)


def headings_of(page: Path) -> set[str]:
    """The anchors of a page, as GitHub forms them."""
    titles = re.findall(r"^#+ (.*)", BLOCK.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_page_shows_the_figures_of_the_file(page):
    text = page.read_text("utf-8")
    opened = re.findall(r"<!-- [\w-]+\.[\w-]+ -->", text)
    assert len(opened) == len(figures.MARKED.findall(text)) == text.count("<!-- / -->"), "each value has an end"
    assert figures.filled(text, FIGURES) == text, "run_scripts/figures.sh --pages writes the pages"
    # A line that begins with a comment is HTML, in which Markdown is text.
    assert not re.search(r"^<!-- (\S+\.\S+|/) -->.*\S", text, re.MULTILINE)


def test_a_check_reports_each_failed_command_and_each_change_except_a_rounding_of_another_cpu(capsys):
    law = {"find": r"^(\d+) cells", "varies_with": "nothing", "text": "48"}
    rounded = {"find": r"loss (\S+)", "text": "0.5"}
    of_a_cpu = {"what": "w", "command": "echo '48 cells'; echo loss 0.7", "varies_with": "cpu", "values": {}}
    failing = of_a_cpu | {"command": "echo no rank; exit 3", "values": {"cells": law}}
    broken = of_a_cpu | {"measured": {"cpu": "another"}, "values": {"cells": law | {"text": "47"}, "loss": rounded}}
    timed = of_a_cpu | {"varies_with": "load", "command": "exit 4", "values": {"loss": rounded}}
    assert figures.check({"failing": failing, "broken": broken, "timed": timed}) == 1
    shown = capsys.readouterr().out
    assert "failing: exit status 3\nno rank" in shown
    assert "broken.cells: 48, not 47\n" in shown
    assert f"broken.loss: 0.7, not 0.5, on {figures.cpu()}\n2 figure(s)" in shown
    assert "timed" not in shown
    changed = broken | {"values": {"cells": law, "loss": rounded}}
    assert [figures.check({"x": changed | {"measured": {"cpu": cpu}}}) for cpu in ("another", figures.cpu())] == [0, 1]


def test_the_generated_pages_are_current():
    for name, page in {"results": figures.results_page(), "settings": figures.settings_page()}.items():
        assert (PROJECT / "docs" / f"{name}.md").read_text("utf-8") == page, "run_scripts/figures.sh --pages"


@pytest.mark.parametrize("page", [*PAGES, figures.FIGURES], ids=[*NAMES, "docs/figures.yaml"])
def test_every_command_is_one_that_its_program_accepts(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    of_figures = [figure["command"] for figure in FIGURES.values()]
    for command in of_figures if page == figures.FIGURES else commands_of(page.read_text("utf-8")):
        for module, flags in programs_of(command):
            parse(module, flags, monkeypatch)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_and_anchors_lead_somewhere(page):
    for target in re.findall(
        r"\]\(([^)\s]+)\)|<(?:img src|a href)=\"([^\"]+)\"", BLOCK.sub("", page.read_text("utf-8"))
    ):
        path, _, anchor = "".join(target).partition("#")
        if not path.startswith(("http:", "https:")):
            linked = page.parent / path if path else page
            assert linked.exists(), target
            assert not anchor or anchor in headings_of(linked), target


def test_files_that_are_named_exist():
    for file in [*PAGES, *SOURCES]:
        text = file.read_text("utf-8")
        for path, anchor in re.findall(r"(?<![\w/.])(docs/\w+\.md)(?:#([\w-]+))?", text):
            assert (PROJECT / path).exists(), f"{file}: {path}"
            assert not anchor or anchor in headings_of(PROJECT / path), f"{file}: {path}#{anchor}"
        if file in PAGES:
            for path in re.findall(r"`((?:app|docs|tests|run_scripts)/[\w./]+)`", text):
                assert (PROJECT / path).exists(), f"{file}: {path}"
            for path, name in re.findall(r"`(?:tests/)?((?:\w+/)?test_\w+\.py)(?:::(\w+))?", text):
                assert f"def {name or 'test'}" + "(" * bool(name) in (PROJECT / "tests" / path).read_text("utf-8"), name


@pytest.mark.parametrize("page", [page for page in PAGES if page.name.startswith("learn")], ids=lambda page: page.name)
def test_each_excerpt_of_the_lesson_is_in_the_script(page):
    script = (PROJECT / "app" / "minimal.py").read_text("utf-8")
    excerpts = [block for kind, block in BLOCK.findall(page.read_text("utf-8")) if kind == "python"]
    assert len(excerpts) == 7, "one for each part of the script"
    for excerpt in excerpts:
        assert any(indent(excerpt, " " * width) in script for width in (4, 8)), excerpt
