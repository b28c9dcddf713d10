"""Command line and config file: parsing, error messages and help."""

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

from app.cli import CommandLine, OneLineParser, as_flags, command_line, parse_settings
from app.common.errors import UserError
from app.data.sampler import plan_batches, resolve_train_batch_size
from app.settings import TYPES, Settings
from app.strategies.ddp import DDPStrategy
from app.training.step import build_optimizer, build_scheduler


def error_message(arguments: list[str]) -> str:
    """Return the one-line message of the UserError that parsing raises."""
    with pytest.raises(UserError) as caught:
        parse_settings(arguments=arguments)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize(
    "flag",
    [
        *("--test_size=0", "--test_size=1", "--test_size=-0.1", "--test_size=nan", "--validation_size=1"),
        *("--max_length=2", "--max_length=-5", "--dropout=1", "--dropout=-0.1", "--train_batch_size=0"),
        *("--gradient_accumulation_steps=0", "--num_train_epochs=0", "--num_train_epochs=inf", "--max_steps=0"),
        *("--max_steps=-2", "--learning_rate=0", "--learning_rate=-1e-3", "--learning_rate=nan", "--warmup_steps=-1"),
        *("--weight_decay=-1", "--adam_beta1=1", "--adam_beta2=1.5", "--adam_epsilon=0", "--max_grad_norm=-1"),
        *("--seed=-1", "--seed=2147483648", "--eval_steps=0", "--eval_batch_size=0", "--threads=-1"),
        *("--logical_ranks=0", "--logical_ranks=-2", "--logical_ranks=4.5", "--logical_ranks=many"),
        *("--strategy=zero4", "--strategy=fsdp", "--cpu_offload", "--activation_checkpointing=perhaps"),
        *("--ddp_bucket_cap_mb=0", "--ddp_timeout=0", "--logging_steps=0", "--profile=-1"),
        *("--max_steps=many", "--learning_rate=fast", "--precision=fp8", "--lr_scheduler_type=magic", "--bf16=perhaps"),
    ],
)
def test_a_value_out_of_range_or_of_the_wrong_type_names_its_flag(flag):
    assert flag.partition("=")[0] in error_message([flag])


def test_a_misspelled_flag_suggests_the_similar_one():
    assert "--lerning_rate" in error_message(["--lerning_rate", "1"])
    assert "did you mean --learning_rate?" in error_message(["--lerning_rate", "1"])
    assert "--learning_rat" in error_message(["--learning_rat=1"]), "abbreviations are not accepted"


def test_the_command_line_overrides_the_config_file_which_overrides_the_defaults(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("learning_rate: 3e-4\nmax-steps: 7\nuse_cpu: true\ncsv:\neval_strategy: no\n", encoding="utf-8")
    settings = parse_settings(arguments=["--config", str(file), "--max_steps", "9"])
    assert (settings.learning_rate, settings.max_steps, settings.use_cpu, settings.csv) == (3e-4, 9, True, None)
    assert settings.eval_strategy == "no"
    assert settings.train_batch_size == Settings().train_batch_size


@pytest.mark.parametrize(
    ("content", "mentions"),
    [
        ("lerning_rate: 1", "lerning_rate"),
        ("config: other.yaml", "config"),
        ("- 1\n- 2", "must be a YAML file"),
        ("a: b: c", "must be a YAML file"),
        ("\xff", "must be a YAML file"),
        ("[" * 3_000, "must be a YAML file"),
        ("{a: " * 1_500, "must be a YAML file"),
    ],
)
def test_an_invalid_config_file_is_reported_with_its_name_and_problem(tmp_path, content, mentions):
    file = tmp_path / "settings.yaml"
    file.write_text(content, encoding="latin-1")
    message = error_message(["--config", str(file)])
    assert message.startswith(f"--config {file}: ")
    assert mentions in message
    assert error_message(["--config", str(tmp_path)]) == f"--config {tmp_path}: Is a directory"


@pytest.mark.parametrize(
    ("content", "arguments", "precision"),
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
def test_bf16_in_a_config_file_is_the_same_as_precision(tmp_path, content, arguments, precision):
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    assert parse_settings(arguments=["--config", str(file), *arguments]) == Settings(precision=precision)


def test_settings_survive_the_conversion_to_flags_and_back():
    settings = Settings(
        csv="a b.csv", precision="bf16", learning_rate=1e-17, dropout=0.0, disable_tqdm=True, max_steps=3
    )
    assert parse_settings(arguments=as_flags(settings)) == settings
    assert as_flags(Settings()) == []


def test_a_program_may_have_its_own_default_of_a_setting(capsys):
    def add_arguments(parser):
        parser.set_defaults(model="tiny-bert")

    settings, own_flags = CommandLine(None, add_arguments).parse([])
    assert (settings.model, settings.max_length, own_flags) == ("tiny-bert", 128, {})
    assert CommandLine(None, add_arguments).parse(["--model=tiny"])[0] == Settings()
    with pytest.raises(SystemExit):
        CommandLine(None, add_arguments).parse(["--help"])
    assert "(default: tiny-bert)" in " ".join(capsys.readouterr().out.split())


def test_a_program_may_have_only_some_settings(tmp_path, capsys):
    only = ("csv", "precision")
    assert CommandLine(only=only).parse(["--csv=a.csv", "--bf16"])[0] == Settings(csv="a.csv", precision="bf16")
    with pytest.raises(UserError, match=r"^unknown argument --max_steps=3 "):
        CommandLine(only=only).parse(["--max_steps=3"])
    (tmp_path / "c.yaml").write_text("max_steps: 3")
    with pytest.raises(UserError, match=r"c\.yaml: unknown setting max_steps "):
        CommandLine(only=only).parse([f"--config={tmp_path}/c.yaml"])
    with pytest.raises(SystemExit):
        CommandLine(only=only).parse(["--help"])
    assert "checkpoints" not in capsys.readouterr().out, "groups without flags are left out"


def test_per_device_batch_size_scales_with_ranks_and_accumulation_steps():
    settings = parse_settings(arguments=["--per_device_train_batch_size=4", "--gradient_accumulation_steps=2"])
    assert settings.per_device_train_batch_size == 4
    assert resolve_train_batch_size(settings, world_size=3) == 24
    assert resolve_train_batch_size(parse_settings(arguments=["--train_batch_size=48"]), world_size=3) == 48
    assert resolve_train_batch_size(parse_settings(arguments=[]), world_size=3) == 32


def test_either_batch_size_on_the_command_line_overrides_the_other_in_the_config_file(tmp_path):
    config = tmp_path / "settings.yaml"
    config.write_text("per_device_train_batch_size: 4\n")
    assert parse_settings(arguments=["--config", str(config)]).per_device_train_batch_size == 4
    settings = parse_settings(arguments=["--config", str(config), "--train_batch_size=64"])
    assert (settings.train_batch_size, settings.per_device_train_batch_size) == (64, None)
    config.write_text("train_batch_size: 64\n")
    assert parse_settings(arguments=["--config", str(config)]).train_batch_size == 64
    settings = parse_settings(arguments=["--config", str(config), "--per_device_train_batch_size=4"])
    assert resolve_train_batch_size(settings, world_size=2) == 8


@pytest.mark.parametrize("resolved", [False, True])
def test_a_per_device_batch_size_survives_the_conversion_to_flags(resolved):
    settings = Settings(per_device_train_batch_size=4)
    if resolved:
        settings.train_batch_size = resolve_train_batch_size(settings, world_size=2)
    assert as_flags(settings) == ["--per_device_train_batch_size=4"]


def test_help_prints_the_description_and_every_flag(capsys):
    with pytest.raises(SystemExit) as exit:
        CommandLine("The description.").parse(["--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    assert "The description." in text
    assert all(f"--{field.name}" in text for field in dataclasses.fields(Settings))


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


def add_sizes(parser: OneLineParser) -> None:
    parser.add_argument("--sizes", type=int, nargs="+", metavar="N", help="how large")
    parser.add_argument("--label", default="none")


def test_a_program_gets_its_own_flags_beside_the_settings():
    settings, own = CommandLine("The description.", add_sizes).parse(["--sizes", "1", "2", "--max_steps=3"])
    assert settings == Settings(max_steps=3)
    assert own == {"sizes": [1, 2], "label": "none"}
    assert CommandLine().parse(["--max_steps=3"]) == (settings, {})
    with pytest.raises(UserError, match=r"^argument --sizes: invalid int value: 'x' \(--help lists all flags\)$"):
        CommandLine(None, add_sizes).parse(["--sizes", "x"])
    with pytest.raises(UserError, match="unknown argument --sizes"):
        CommandLine().parse(["--sizes", "1"])


def test_the_help_names_the_module_that_was_started(capsys, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec("app.bench.memory", None))
    monkeypatch.setattr(sys, "argv", ["/somewhere/memory.py", "--csv", "a b.csv"])
    with pytest.raises(SystemExit):
        CommandLine("The description.").parse(["--help"])
    assert "python -m app.bench.memory [--flag VALUE" in capsys.readouterr().out
    assert command_line() == "python -m app.bench.memory --csv 'a b.csv'"
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert command_line() == "python -m app.memory --csv 'a b.csv'"
    monkeypatch.setattr(sys, "argv", ["/somewhere/plan/__main__.py"])
    assert command_line() == "python -m app.plan"
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec("app.plan.__main__", None))
    assert command_line() == "python -m app.plan"


def test_the_help_lists_the_flags_of_the_program(capsys):
    with pytest.raises(SystemExit):
        CommandLine("The description.", add_sizes).parse(["--help"])
    text = capsys.readouterr().out
    assert re.search(r"--sizes N \[N \.\.\.\] +how large", text)
    assert "--learning_rate" in text
