"""The help of every program: what it lists is accepted, what it does not list is rejected, and all look alike."""

from __future__ import annotations

import argparse
import re
import runpy
import sys
import warnings
from dataclasses import fields

import pytest

from app import early
from app.cli import FLAGS_OF_ONE_RUN, OneLineParser
from app.flags import BENCHMARKS
from app.settings import GROUPS

WITHOUT_SETTINGS = ("minimal", "bench/scaling", "bench/growth", "experiments/faults")
PATHS = {"ddp_loop": {}, "trainer_run": {}}
REJECTED = PATHS | {name.replace(".", "/"): rejected for name, rejected in BENCHMARKS.items()}
PROGRAMS = (
    *REJECTED,
    *("compare", "plan", "experiments/same_bits"),
    *WITHOUT_SETTINGS,
)


@pytest.fixture(params=PROGRAMS)
def program(request) -> str:
    return request.param


@pytest.fixture
def parser(program, monkeypatch) -> OneLineParser:
    """The parser that prints the program's help."""
    found = []
    monkeypatch.setattr(argparse.ArgumentParser, "print_help", lambda self: found.append(self))
    monkeypatch.setattr("app.program.stop_importing", lambda: None)
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    monkeypatch.setattr(warnings, "warn", lambda *args, **kwargs: None)  # another test has imported the module
    if program.replace("/", ".") in early.REJECTED | early.WITHOUT_SETTINGS:
        monkeypatch.setattr(sys, "orig_argv", ["python", "-m", f"app.{program.replace('/', '.')}", "--help"])
        monkeypatch.setattr(sys, "argv", ["-m", "--help"])
        with pytest.raises(SystemExit):
            early.check_command_line()
        monkeypatch.setattr(sys, "argv", [program, "--help"])
    with pytest.raises(SystemExit) as exit:
        runpy.run_module(f"app.{program.replace('/', '.')}", run_name="__main__", alter_sys=True)
    assert exit.value.code == 0
    assert len({parser.format_help() for parser in found}) == 1, "the same before and after the program's imports"
    return found[-1]


def test_all_helps_look_alike_and_begin_with_the_own_flags(parser, program):
    text = parser.format_help()
    assert text.startswith(f"usage: python -m app.{program.replace('/', '.')} [--flag VALUE …]\n\n{parser.description}")
    assert re.search(rf"-m {'app/' + program}".replace("/", r"\."), parser.description), "an example"
    titles = re.findall(r"^([a-z].*):$", text.partition(str(parser.description))[2], re.MULTILINE)
    groups = () if program in WITHOUT_SETTINGS else GROUPS
    rejected = REJECTED.get(program, FLAGS_OF_ONE_RUN)
    of_settings = [group.__doc__ for group in groups if {field.name for field in fields(group)} - set(rejected)]
    assert titles == [*(["positional arguments"] if program == "compare" else []), "options", *of_settings]
    # A default is printed once.
    assert not re.search(r"default: [^\n]*\(default: ", text)
