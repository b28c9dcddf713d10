"""A run is resumed only with the same content of its model's folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.architectures import write_model
from helpers.jobs import write_reviews
from helpers.run_folders import edit_json

from app import ddp_loop
from app.common.errors import AgreedError
from app.settings import Settings
from app.training.prepare import prepare


def swap_tokens(model: Path) -> None:
    file = model / "tokenizer.json"
    text = file.read_text("utf-8")
    file.write_text(text.replace('"好":', '"":').replace('"差":', '"好":').replace('"":', '"差":'), "utf-8")


CHANGES: dict[str, Callable[[Path], None]] = {
    "has changed: hidden_dropout_prob": lambda model: edit_json(model / "config.json", hidden_dropout_prob=0.5),
    "has changed: num_hidden_layers": lambda model: edit_json(model / "config.json", num_hidden_layers=1),
    "returns other tokens for the same reviews, or pads differently": swap_tokens,
    "or pads differently": lambda model: edit_json(model / "tokenizer_config.json", padding_side="left"),
}


@pytest.fixture(scope="module")
def resumed(world, tmp_path_factory) -> Settings:
    """The settings of a run that resumes the checkpoint of another one."""
    folder = tmp_path_factory.mktemp("trained")
    write_reviews(folder / "reviews.csv", 60)
    settings = Settings(csv=str(folder / "reviews.csv"), model=str(write_model(folder / "model", "bert")), max_steps=1)
    settings = replace(settings, max_length=16, save_strategy="steps", save_steps=1, use_cpu=True, disable_tqdm=True)
    ddp_loop.fine_tune(replace(settings, output_dir=str(folder / "run")), world)
    return replace(settings, resume_from_checkpoint=str(folder / "run/checkpoints/checkpoint-1"))


@pytest.mark.parametrize("message", CHANGES)
def test_a_changed_model_folder_is_refused(resumed, world, tmp_path, monkeypatch, message):
    monkeypatch.chdir(tmp_path)  # a run that starts from a checkpoint has a new folder
    model = write_model(tmp_path / "model", "bert")
    same = prepare("ddp_loop", replace(resumed, model=str(model)), world)  # the same content in another place
    os.close(same.lock)
    CHANGES[message](model)
    with pytest.raises(AgreedError, match=f"cannot resume from .* {message}$"):
        prepare("ddp_loop", replace(resumed, model=str(model)), world)
