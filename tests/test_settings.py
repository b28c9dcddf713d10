from __future__ import annotations

import dataclasses
import math
import os

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from worlds import fake_world

from app.cli import as_flags, parse_settings
from app.data.sampler import plan_batches
from app.errors import UserError
from app.settings import GROUPS, Settings
from app.strategies.ddp import DDP
from app.training.optim import build_optimizer, build_scheduler


def one_line(arguments: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        parse_settings(arguments=arguments)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_every_knob_is_in_one_group_and_has_help():
    names = [field.name for group in GROUPS for field in dataclasses.fields(group)]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(Settings))
    assert all(field.metadata.get("help") for field in dataclasses.fields(Settings))


@pytest.mark.parametrize(
    "flag",
    [
        *("--test_size=0", "--test_size=1", "--test_size=-0.1", "--test_size=nan", "--validation_size=1"),
        *("--max_length=2", "--max_length=-5", "--dropout=1", "--dropout=-0.1", "--train_batch_size=0"),
        *("--gradient_accumulation_steps=0", "--num_train_epochs=0", "--num_train_epochs=inf", "--max_steps=0"),
        *("--max_steps=-2", "--learning_rate=0", "--learning_rate=-1e-3", "--learning_rate=nan", "--warmup_steps=-1"),
        *("--weight_decay=-1", "--adam_beta1=1", "--adam_beta2=1.5", "--adam_epsilon=0", "--max_grad_norm=-1"),
        *("--seed=-1", "--seed=2147483648", "--eval_steps=0", "--eval_batch_size=0", "--threads=-1"),
        *("--ddp_bucket_cap_mb=0", "--ddp_timeout=0", "--logging_steps=0"),
        *("--max_steps=many", "--learning_rate=fast", "--precision=fp8", "--lr_scheduler_type=magic", "--bf16=perhaps"),
    ],
)
def test_a_number_out_of_range_or_a_word_in_its_place_names_its_flag(flag):
    assert flag.partition("=")[0] in one_line([flag])


def test_every_problem_is_told_at_once():
    message = one_line(["--learning_rate=0", "--test_size=2", "--max_length=1"])
    assert all(name in message for name in ("--learning_rate", "--test_size", "--max_length"))


def test_an_unknown_flag_is_named_with_the_one_that_was_meant():
    assert "--lerning_rate" in one_line(["--lerning_rate", "1"])
    assert "did you mean --learning_rate?" in one_line(["--lerning_rate", "1"])
    assert "--learning_rat" in one_line(["--learning_rat=1"]), "no silent abbreviations"


def test_the_command_line_wins_over_the_file_which_wins_over_the_defaults(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("learning_rate: 3e-4\nmax-steps: 7\nuse_cpu: true\ncsv:\neval_strategy: no\n", encoding="utf-8")
    settings = parse_settings(arguments=["--config", str(file), "--max_steps", "9"])
    assert (settings.learning_rate, settings.max_steps, settings.use_cpu, settings.csv) == (3e-4, 9, True, None)
    assert settings.eval_strategy == "no"
    assert settings.train_batch_size == Settings().train_batch_size


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("lerning_rate: 1", "lerning_rate"),
        ("learning_rate: [1, 2]", "learning_rate"),
        ("- 1\n- 2", "mapping"),
        ("a: b: c", "YAML"),
        ("test_size: much", "test_size"),
        ("precision: fp8", "precision"),
    ],
)
def test_a_wrong_config_file_is_named_with_what_is_wrong(tmp_path, content, names):
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    message = one_line(["--config", str(file)])
    assert str(file) in message
    assert names in message
    assert str(tmp_path / "none.yaml") in one_line(["--config", str(tmp_path / "none.yaml")])


def test_bf16_and_precision_say_the_same():
    assert parse_settings(arguments=["--bf16"]).precision == "bf16"
    assert parse_settings(arguments=["--precision", "bf16"]).bf16
    assert parse_settings(arguments=[]).precision == "fp32"
    assert "--bf16" in one_line(["--bf16", "--precision", "fp64"])


def test_flags_made_of_settings_give_the_same_settings():
    settings = Settings(csv="a b.csv", bf16=True, learning_rate=1e-17, dropout=0.0, disable_tqdm=True, max_steps=3)
    assert parse_settings(arguments=as_flags(settings)) == settings
    assert as_flags(Settings()) == []


def test_the_help_is_a_text_about_every_flag(capsys):
    with pytest.raises(SystemExit) as left:
        parse_settings("How to use it.", ["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert "How to use it." in text
    assert all(f"--{field.name}" in text for field in dataclasses.fields(Settings))


NUMBERS = [field.name for field in dataclasses.fields(Settings) if {"int", "float"} & set(str(field.type).split())]
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
def test_every_number_trains_or_is_one_short_line_that_names_its_flag(name, value, schedule):
    told = None
    try:
        settings = parse_settings(arguments=[f"--{name}={value}", "--lr_scheduler_type", schedule])
        plan = plan_batches(settings, n_train=7_000, world_size=2)
    except UserError as problem:
        told = str(problem)
    if told is not None:
        assert f"--{name}" in told
        assert len(told.splitlines()) == 1
        assert len(told) < 400
        return
    optimizer = build_optimizer(
        torch.nn.Linear(2, 2), settings, settings.learning_rate or 1e-3, DDP(settings, fake_world())
    )
    scheduler = build_scheduler(optimizer, settings, plan.total_steps)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
        assert all(map(math.isfinite, scheduler.get_last_lr()))
    assert len(str(plan)) < 200


@pytest.mark.parametrize("columns", ["", "0", "-5", "1", "wide", "9" * 5000, "1000"])
def test_the_help_comes_whatever_columns_says(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as left:
        parse_settings("How to use it.", ["--help"])
    assert left.value.code == 0
    assert "--learning_rate" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["model", "output_dir", "resume_from_checkpoint"])
def test_a_path_that_is_not_utf8_is_one_line(name):
    with pytest.raises(UserError, match=f"--{name} .*must be UTF-8"):
        Settings(**{name: os.fsdecode(b"runs/x\xffy")})
    Settings(**{name: "runs/酒店\n\\é"})
