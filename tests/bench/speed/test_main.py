"""What the benchmark refuses before it measures anything."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
from helpers.worlds import fake_world

from app.bench.speed.__main__ import check, check_memory
from app.cli import parse_flags
from app.common.errors import UserError
from app.flags import BENCHMARKS, add_speed_flags
from app.settings import Settings


def test_recipes_that_do_not_fit_into_memory_are_refused(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**30))
    world = fake_world(size=2)
    check_memory(2**24, 32, world)
    with pytest.raises(
        UserError, match=r"^33 recipes need 1\.03 GiB on this node, and 1 GiB are available: .*--recipes"
    ):
        check_memory(2**24, 33, world)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--precision=bf16"], "--precision: each recipe has its own: select them with --recipes"),
        (["--bf16"], "--bf16: each recipe has its own"),
        (["--max_steps=5"], "--max_steps: has no effect on this benchmark: remove the flag"),
        (["--eval_strategy", "no"], "--eval_strategy: has no effect"),
        (["--logging-steps=10"], "--logging_steps: has no effect"),  # the default, but the user expects an effect
        (["--resume_from_checkpoint=auto"], "--resume_from_checkpoint: has no effect"),
    ],
)
def test_settings_that_have_no_effect_are_refused(flags, message):
    with pytest.raises(UserError, match=message):
        parse_flags(None, flags, add_speed_flags, rejected=BENCHMARKS["bench.speed"])


def test_a_setting_in_a_config_file_that_has_no_effect_is_refused(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("train_batch_size: 8\nprofile: 5\n")
    with pytest.raises(UserError, match=f"^--config {path}: --profile: has no effect on this benchmark"):
        parse_flags(None, [f"--config={path}"], add_speed_flags, rejected=BENCHMARKS["bench.speed"])


def test_settings_without_effect_on_the_selected_models_or_recipes_are_refused():
    sharded = Settings(model="bert", strategy="zero3", train_batch_size=8)
    check(sharded, None, ["tutorial", "ddp_loop-bf16"])
    with pytest.raises(UserError, match=r"^--models and --model exclude each other"):
        check(sharded, ["tiny-bert"], ["ddp_loop"])
    with pytest.raises(UserError, match=r"^--strategy=zero3: has no effect on these --recipes"):
        check(sharded, None, ["tutorial", "accelerate-bf16"])
    check(Settings(model="tiny-bert", train_batch_size=8, seed=1, threads=1), ["4x312"], ["tutorial"])


def test_settings_that_have_an_effect_are_accepted():
    flags = ["--train_batch_size=8", "--output_dir=here", "--learning_rate=1e-4", "--recipes", "tutorial"]
    settings, own = parse_flags(None, flags, add_speed_flags, rejected=BENCHMARKS["bench.speed"])
    assert (settings.train_batch_size, settings.output_dir, own["recipes"]) == (8, "here", ["tutorial"])
