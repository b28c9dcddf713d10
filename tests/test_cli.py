"""Command line and config file: which one decides, and a program's own flags. test_settings.py has the values."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from importlib.machinery import ModuleSpec
from typing import get_args

import pytest
import torch
from helpers.worlds import fake_world
from hypothesis import example, given
from hypothesis import strategies as st

from app.cli import CommandLine, as_flags, command_line, parse_settings
from app.common.errors import UserError
from app.data.sampler import plan_batches, resolve_train_batch_size
from app.settings import TYPES, Settings
from app.strategies.ddp import DDPStrategy
from app.training.step import build_optimizer, build_scheduler

SETTINGS = CommandLine()


@pytest.fixture
def parse(tmp_path):
    """Parse flags, with the content of a config file: `parse("--max_steps=9", config="max_steps: 7")`."""

    def parse(*flags: str, config: str | bytes = "", program: CommandLine = SETTINGS) -> Settings:
        file = tmp_path / "settings.yaml"
        file.write_bytes(config if isinstance(config, bytes) else config.encode())
        return program.parse([f"--config={file}", *flags])[0]

    return parse


def test_the_command_line_overrides_the_config_file_which_overrides_the_defaults(parse):
    config = "learning_rate: 3e-4\nmax-steps: 7\nuse_cpu: true\ncsv:\neval_strategy: no\n"
    expected = Settings(learning_rate=3e-4, max_steps=9, use_cpu=True, csv=None, eval_strategy="no")
    assert parse("--max_steps", "9", config=config) == expected


@pytest.mark.parametrize(
    ("content", "mentions"),
    [
        (b"lerning_rate: 1", "lerning_rate"),
        (b"config: other.yaml", "config"),
        (b"a: b: c", "must be a YAML file"),
        (b"\xff", "must be a YAML file"),
        (b"[" * 3_000, "must be a YAML file"),
        (b"{a: " * 1_500, "must be a YAML file"),
    ],
)
def test_an_invalid_config_file_is_reported_with_its_name_and_problem(parse, content, mentions):
    with pytest.raises(UserError, match=rf"^--config \S+settings\.yaml: .*{mentions}.*$"):
        parse(config=content)


@pytest.mark.parametrize(
    ("content", "flags", "precision"),
    [
        ("bf16: true", [], "bf16"),
        ("bf16: false", [], "fp32"),
        ("bf16:", [], "fp32"),
        ("bf16: false\nprecision: fp64", [], "fp64"),
        ("", ["--bf16", "true"], "bf16"),
        ("", ["--bf16", "--precision=bf16"], "bf16"),
        ("", ["--bf16=false", "--precision=fp64"], "fp64"),
        ("bf16: true\nprecision: bf16", [], "bf16"),
        ("bf16: true", ["--precision=fp64"], "fp64"),
        ("precision: fp64", ["--bf16"], "bf16"),
        ("precision: fp64", ["--bf16=false"], "fp64"),
    ],
)
def test_bf16_is_the_same_as_precision(parse, content, flags, precision):
    assert parse(*flags, config=content) == Settings(precision=precision)


@pytest.mark.parametrize("content", ["report_to: [tensorboard]", "label_names: {0: bad}", "class_weights: [1, 2]"])
def test_a_list_or_a_mapping_in_a_config_file_is_one_line(parse, content):
    with pytest.raises(UserError, match=f"^--{content.partition(':')[0]} .*: must be a valid string$"):
        parse(config=content)


def test_either_batch_size_on_the_command_line_overrides_the_other_in_the_config_file(parse):
    assert parse(config="per_device_train_batch_size: 4").per_device_train_batch_size == 4
    settings = parse("--train_batch_size=64", config="per_device_train_batch_size: 4")
    assert (settings.train_batch_size, settings.per_device_train_batch_size) == (64, None)
    settings = parse("--per_device_train_batch_size=4", config="train_batch_size: 64")
    assert resolve_train_batch_size(settings, world_size=2) == 8


def test_per_device_batch_size_scales_with_ranks_and_accumulation_steps():
    settings = Settings(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert resolve_train_batch_size(settings, world_size=3) == 24
    assert resolve_train_batch_size(Settings(train_batch_size=48), world_size=3) == 48
    assert resolve_train_batch_size(Settings(), world_size=3) == 32
    assert as_flags(settings) == ["--per_device_train_batch_size=4", "--gradient_accumulation_steps=2"]
    settings.train_batch_size = resolve_train_batch_size(settings, world_size=2)
    assert "--train_batch_size" not in " ".join(as_flags(settings)), "the flags exclude each other"


def test_settings_survive_the_conversion_to_flags_and_back():
    settings = Settings(
        csv="a b.csv", precision="bf16", learning_rate=1e-17, dropout=0.0, disable_tqdm=True, max_steps=3
    )
    assert parse_settings(arguments=as_flags(settings)) == settings
    assert as_flags(Settings()) == []


# ---- programs --------------------------------------------------------------------------------------------------------


def add_arguments(parser):
    parser.set_defaults(model="tiny-bert")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="N", help="how large")
    parser.add_argument("--label", default="none")


PROGRAM = CommandLine("The description.", add_arguments)


def help_of(program: CommandLine, capsys) -> str:
    with pytest.raises(SystemExit) as exit:
        program.parse(["--help"])
    assert exit.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_a_program_has_flags_and_defaults_of_its_own(capsys):
    settings, own = PROGRAM.parse(["--sizes", "1", "2", "--max_steps=3"])
    assert settings == Settings(model="tiny-bert", max_steps=3)
    assert own == {"sizes": [1, 2], "label": "none"}
    assert PROGRAM.parse(["--model=tiny"])[0] == Settings()
    with pytest.raises(UserError, match=r"^argument --sizes: invalid int value: 'x' "):
        PROGRAM.parse(["--sizes", "x"])
    with pytest.raises(UserError, match="unknown argument --sizes"):
        SETTINGS.parse(["--sizes", "1"])
    with pytest.raises(UserError, match=r"unknown argument --learning_rat=1: did you mean --learning_rate\?"):
        SETTINGS.parse(["--learning_rat=1"])
    text = help_of(PROGRAM, capsys)
    assert "The description." in text
    assert "(default: tiny-bert)" in text
    assert "--sizes N [N ...] how large" in text
    assert all(f"--{field.name}" in text for field in dataclasses.fields(Settings))


def test_a_program_may_have_only_some_settings(parse, capsys):
    program = CommandLine(only=("csv", "precision"))
    assert program.parse(["--csv=a.csv", "--bf16"])[0] == Settings(csv="a.csv", precision="bf16")
    with pytest.raises(UserError, match=r"^unknown argument --max_steps=3 "):
        program.parse(["--max_steps=3"])
    with pytest.raises(UserError, match=r"unknown setting max_steps "):
        parse(config="max_steps: 3", program=program)
    assert "checkpoints" not in help_of(program, capsys), "groups without flags are left out"


@pytest.mark.parametrize(
    ("module", "file", "name"),
    [
        ("app.bench.memory", "/somewhere/memory.py", "app.bench.memory"),
        ("app.plan.__main__", "/somewhere/plan/__main__.py", "app.plan"),
        (None, "/somewhere/memory.py", "app.memory"),
        (None, "/somewhere/plan/__main__.py", "app.plan"),
    ],
)
def test_the_help_names_the_module_that_was_started(capsys, monkeypatch, module, file, name):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", module and ModuleSpec(module, None))
    monkeypatch.setattr(sys, "argv", [file, "--csv", "a b.csv"])
    assert command_line() == f"python -m {name} --csv 'a b.csv'"
    assert f"python -m {name} [--flag VALUE" in help_of(SETTINGS, capsys)


# ---- numbers ---------------------------------------------------------------------------------------------------------

NUMBERS = [name for name, kind in TYPES.items() if re.search(r"\b(int|float)\b", str(get_args(kind)[0]))]
EXTREMES = ("", "0", "-0.0", "-1", "1e308", "-1e308", "1.7976931348623157e308", "5e-324", "nan", "inf", "-inf", "1_0")
EXTREMES += ("2147483647", "2147483648", "9223372036854775808", "9" * 30, "9" * 400, "9" * 5000, "1e400")


@given(
    st.sampled_from(NUMBERS),
    st.sampled_from(EXTREMES) | st.integers().map(str) | st.floats().map(repr),
    st.sampled_from(["linear", "cosine", "constant_with_warmup"]),
)
@example("num_train_epochs", "1e308", "linear")
@example("max_steps", "9" * 400, "linear")
@example("warmup_steps", "1e308", "linear")
@example("eval_batch_size", "9" * 400, "linear")
@example("threads", "9" * 400, "linear")
@example("pad_to_multiple_of", "9" * 400, "linear")
@example("max_length", "9" * 400, "linear")
@example("per_device_train_batch_size", "3501", "linear")
@example("logical_ranks", "1", "linear")
@example("logical_ranks", "3", "linear")
@example("logical_ranks", "64", "linear")
def test_every_number_either_trains_or_is_a_short_error_that_names_its_flag(name, value, schedule):
    error = None
    try:
        settings = parse_settings(arguments=[f"--{name}={value}", "--lr_scheduler_type", schedule])
        plan = plan_batches(settings, n_train=7_000, world_size=2)
    except UserError as problem:
        error = str(problem)
    if error is not None:
        assert f"--{name}" in error
        assert len(error.splitlines()) == 1
        assert len(error) < 400
        return
    strategy = DDPStrategy(settings, plan, fake_world())
    optimizer = build_optimizer(torch.nn.Linear(2, 2), settings, strategy=strategy)
    scheduler = build_scheduler(optimizer, settings, plan.total_steps)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
        assert all(map(math.isfinite, scheduler.get_last_lr()))
    assert len(str(plan)) < 200
