"""A run is resumed only with the same content of its model's folder."""

from __future__ import annotations

import json
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
from app.runs.schema import METRICS
from app.settings import Settings
from app.training.prepare import prepare


def permute_vocabulary(model: Path) -> None:
    file = model / "tokenizer.json"
    content = json.loads(file.read_text("utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["好"], vocabulary["差"] = vocabulary["差"], vocabulary["好"]
    file.write_text(json.dumps(content, ensure_ascii=False), "utf-8")


CHANGES: dict[str, Callable[[Path], None]] = {
    "has changed: hidden_dropout_prob": lambda model: edit_json(model / "config.json", hidden_dropout_prob=0.5),
    "has changed: num_hidden_layers": lambda model: edit_json(model / "config.json", num_hidden_layers=1),
    "returns other tokens for the same reviews, or pads differently": permute_vocabulary,
    "or pads differently": lambda model: edit_json(model / "tokenizer_config.json", padding_side="left"),
}


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory) -> Settings:
    """The settings of a finished run of a local model folder, with a checkpoint of step 1 of 2."""
    folder = tmp_path_factory.mktemp("trained")
    write_reviews(folder / "reviews.csv", 60)
    settings = Settings(
        csv=str(folder / "reviews.csv"),
        model=str(write_model(folder / "model", "bert")),
        cache_dir=str(folder / "cache"),
        output_dir=str(folder / "run"),
        max_length=16,
        max_steps=2,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    ddp_loop.fine_tune(settings, world)
    return replace(settings, output_dir=None, resume_from_checkpoint=str(folder / "run/checkpoints/checkpoint-1"))


@pytest.mark.parametrize("message", CHANGES)
def test_a_changed_model_folder_is_refused(trained, world, tmp_path, monkeypatch, message):
    """The lock that a failed start leaves to the end of its process is no concern here."""
    monkeypatch.setattr("app.checkpoint.resume.lock", lambda run: os.open(run, os.O_RDONLY))
    monkeypatch.chdir(tmp_path)  # a run that starts from a checkpoint has a new folder
    model = write_model(tmp_path / "model", "bert")
    same = prepare("ddp_loop", replace(trained, model=str(model)), world)  # the same content in another place
    os.close(same.lock)
    CHANGES[message](model)
    with pytest.raises(AgreedError, match=f"cannot resume from .* {message}$"):
        prepare("ddp_loop", replace(trained, model=str(model)), world)
    run = Path(str(trained.resume_from_checkpoint)).parents[1]
    assert (run / METRICS.name).exists(), "nothing is removed"
    assert (run / "checkpoints" / "checkpoint-2").exists()
