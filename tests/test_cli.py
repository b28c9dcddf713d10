"""Command line and config file: which one decides, and a program's own flags. test_settings.py has the values."""

from __future__ import annotations

import importlib
import math
import re
import sys
from itertools import product
from typing import get_args

import pytest
import torch
from helpers.worlds import fake_world

from app.cli import CommandLine, as_flags, parse_settings
from app.common.errors import UserError
from app.data.batches import plan_batches, resolve_train_batch_size
from app.program import check_libraries
from app.settings import EVERYDAY_SETTINGS, TYPES, Settings
from app.strategies.ddp import DDPStrategy
from app.training.step import build_optimizer, build_scheduler

SETTINGS = CommandLine()
NO_YAML = (b"a: b: c", b"\xff", b"[" * 3_000, b"{a: " * 1_500)


@pytest.fixture
def parse(tmp_path):
    """Parse flags, with the content of a config file: `parse("--max_steps=9", config="max_steps: 7")`."""

    def parse(*flags: str, config: str | bytes = "", program: CommandLine = SETTINGS) -> Settings:
        file = tmp_path / "settings.yaml"
        file.write_bytes(config if isinstance(config, bytes) else config.encode())
        return program.parse([f"--config={file}", *flags])[0]

    return parse


def test_the_command_line_overrides_the_config_file_which_overrides_the_defaults(parse):
    config = "\ufefflearning_rate: 3e-4\nmax-steps: 7\nuse_cpu: true\ncsv:\neval_strategy: no\n"
    expected = Settings(learning_rate=3e-4, max_steps=9, use_cpu=True, csv=None, eval_strategy="no")
    assert parse("--max_steps", "9", config=config) == expected


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"lerning_rate: 1", r"--config \S+settings\.yaml: .*lerning_rate.*"),
        (b"config: other.yaml", r"--config \S+settings\.yaml: .*config.*"),
        *((text, r"--config \S+settings\.yaml: .*must be a YAML file.*") for text in NO_YAML),
        # A list or a mapping.
        (b"report_to: [tensorboard]", "--report_to .*: must be a valid string"),
        (b"label_names: {0: bad}", "--label_names .*: must be a valid string"),
        (b"class_weights: [1, 2]", "--class_weights .*: must be a valid string"),
    ],
)
def test_an_invalid_config_file_is_one_line_that_names_the_file_or_the_flag(parse, content, problem):
    with pytest.raises(UserError) as error:
        parse(config=content)
    assert re.fullmatch(problem, str(error.value))


@pytest.mark.parametrize(
    ("content", "flags", "precision"),
    [
        ("bf16: true", "", "bf16"),
        ("bf16:", "", "fp32"),
        ("bf16: false\nprecision: fp64", "", "fp64"),
        ("", "--bf16 true --precision=bf16", "bf16"),
        ("", "--bf16=false --precision=fp64", "fp64"),
        ("bf16: true", "--precision=fp64", "fp64"),  # the command line overrides the file
        ("precision: fp64", "--bf16", "bf16"),
        ("precision: fp64", "--bf16=false", "fp64"),
    ],
)
def test_bf16_is_the_same_as_precision(parse, content, flags, precision):
    assert parse(*flags.split(), config=content) == Settings(precision=precision)


def test_either_batch_size_on_the_command_line_overrides_the_other_in_the_config_file(parse):
    assert parse(config="per_device_train_batch_size: 4").per_device_train_batch_size == 4
    settings = parse("--train_batch_size=64", config="per_device_train_batch_size: 4")
    assert (settings.train_batch_size, settings.per_device_train_batch_size) == (64, None)
    settings = parse("--per_device_train_batch_size=4", config="train_batch_size: 64")
    assert resolve_train_batch_size(settings, world_size=2) == 8


def test_a_file_that_would_be_imported_in_place_of_a_library_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "evaluate", raising=False)
    (tmp_path / "evaluate.py").touch()
    importlib.invalidate_caches()
    with pytest.raises(UserError, match=r"evaluate\.py: would be imported in place of the library evaluate"):
        check_libraries()


def test_settings_survive_the_conversion_to_flags_and_back():
    settings = Settings(
        csv="a b.csv", precision="bf16", learning_rate=1e-17, dropout=0.0, disable_tqdm=True, max_steps=3
    )
    assert parse_settings(as_flags(settings)) == settings
    assert as_flags(Settings()) == []
    settings = Settings(per_device_train_batch_size=4)
    settings.train_batch_size = resolve_train_batch_size(settings, world_size=2)
    assert as_flags(settings) == ["--per_device_train_batch_size=4"], "the flags exclude each other"


# ---- programs --------------------------------------------------------------------------------------------------------


def add_arguments(parser):
    parser.set_defaults(model="tiny-bert")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="N", help="how large")
    parser.add_argument("--label", default="none")


@pytest.fixture
def help_of(capsys):
    """Return the help of a program."""

    def help_of(program: CommandLine, flag: str = "--help") -> str:
        with pytest.raises(SystemExit, match="0"):
            program.parse([flag])
        return " ".join(capsys.readouterr().out.split())

    return help_of


def test_a_program_has_flags_and_defaults_of_its_own(help_of):
    program = CommandLine("The description.", add_arguments)
    settings, own = program.parse(["--sizes", "1", "2", "--max_steps=3"])
    assert settings == Settings(model="tiny-bert", max_steps=3)
    assert own == {"sizes": [1, 2], "label": "none"}
    assert program.parse(["--model=tiny"])[0] == Settings()
    with pytest.raises(UserError, match=r"^argument --sizes: invalid int value: 'x' "):
        program.parse(["--sizes", "x"])
    text = help_of(program)
    for shown in ("The description.", "(default: tiny-bert)", "--sizes N [N ...] how large"):
        assert shown in text
    assert {name for name in TYPES if re.search(rf" --{name} [A-Z{{[]", text)} == EVERYDAY_SETTINGS
    everything = help_of(program, "--help-all")
    assert [name for name in TYPES if f" --{name} " not in everything] == []


def test_a_program_may_have_only_some_settings(parse, help_of):
    program = CommandLine(only=("csv", "precision"))
    assert program.parse(["--csv=a.csv", "--bf16"])[0] == Settings(csv="a.csv", precision="bf16")
    with pytest.raises(UserError, match=r"^unknown argument --max_steps=3 "):
        program.parse(["--max_steps=3"])
    of_a_run = "max_steps: 3\ncsv: a.csv\nbf16: true\n"  # the config file of a training run
    assert parse(config=of_a_run, program=program) == Settings(csv="a.csv", precision="bf16")
    assert parse(config=of_a_run, program=CommandLine(only=("csv",))) == Settings(csv="a.csv")
    with pytest.raises(UserError, match=r"unknown setting lerning_rate "):
        parse(config="lerning_rate: 3", program=program)
    text = help_of(program)
    assert "checkpoints" not in text, "groups without flags are left out"
    assert "--help_all" not in text, "--help lists all of a few settings"


# ---- numbers ---------------------------------------------------------------------------------------------------------

NUMBERS = [name for name, kind in TYPES.items() if re.search(r"\b(int|float)\b", str(get_args(kind)[0]))]
VALUES = ("", "0", "1", "3", "64", "3501", "0.5", "-0.0", "-1", "nan", "inf", "-inf", "1_0", "1e-5", "5e-324")
VALUES += ("1e308", "-1e308", "1.7976931348623157e308", "1e400", "2147483647", "2147483648", "9223372036854775808")
VALUES += ("9" * 30, "9" * 400, "9" * 5000)


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_either_trains_or_is_a_short_error_that_names_its_flag(name):
    for value, schedule in product(VALUES, ("linear", "cosine", "constant_with_warmup")):
        problem = None
        try:
            settings = parse_settings([f"--{name}={value}", f"--lr_scheduler_type={schedule}"])
            plan = plan_batches(settings, n_train=7_000, world_size=2)
        except UserError as error:
            problem = str(error)
        if problem is not None:
            assert f"--{name}" in problem
            assert re.fullmatch(".{,400}", problem), "one line"
            continue
        strategy = DDPStrategy(settings, plan, fake_world())
        optimizer = build_optimizer(torch.nn.Linear(2, 2), settings, strategy=strategy)
        scheduler = build_scheduler(optimizer, settings, plan.total_steps)
        for _ in range(3):
            optimizer.step()
            scheduler.step()
            assert all(map(math.isfinite, scheduler.get_last_lr())), value
        assert len(str(plan)) < 200
