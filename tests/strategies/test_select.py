"""Every strategy trains every kind of model to the same bits. Here with one process; tests/launched has several."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers.architectures import CONFIGS, PAIR, SMALL
from helpers.worlds import batch_plan
from torch.testing import assert_close
from transformers import AlbertConfig, AutoModelForSequenceClassification, BartConfig, PreTrainedModel, Trainer

from app.bench.steps import Bench
from app.checkpoint.state import TrainingState
from app.ddp_loop import train_step
from app.distributed.world import World
from app.settings import Settings
from app.trainer.arguments import TrainingArgumentsWithoutPlacement
from app.training.build import select_strategy

MODELS = CONFIGS | {
    "deep_bart": BartConfig(d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, **PAIR | {"decoder_layers": 3}),
    "albert": AlbertConfig(**SMALL, embedding_size=16),
}


def new_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = copy.deepcopy(MODELS[name])
    config.vocab_size, config.pad_token_id = 50, 5
    return AutoModelForSequenceClassification.from_config(config)


def train(strategies: Sequence[str], world: World, name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Train four steps, with an evaluation after each one. Return all that has to be bitwise identical.

    Each strategy resumes from a checkpoint of the one before. After an evaluation, zero2 still has the complete
    parameters.
    """
    plan, steps, found = batch_plan(1, 2), 4 // len(strategies), {}
    ids = torch.randint(6, 50, (2, 2, 7), generator=torch.Generator().manual_seed(1))  # micro-batches, rows, tokens
    ids[..., -1] = 2  # BART classifies the end-of-sequence token
    batches = [{"input_ids": rows, "labels": torch.tensor([0, 1])} for rows in ids]
    for number, strategy_name in enumerate(strategies):
        settings = Settings(strategy=strategy_name, learning_rate=1e-2, warmup_steps=0, dropout=0.1)
        model, strategy = new_model(name), select_strategy(settings, plan, world)
        data, wrapped = SimpleNamespace(plan=plan), strategy.wrap(model)
        optimization = Bench(settings, world, data, strategy, model, wrapped, batches).optimization(plan.total_steps)
        state = TrainingState(model, optimization, strategy, world)
        if number > 0:
            state.load(folder)
        for step in range(number * steps, (number + 1) * steps):
            found[f"losses {step}"], found[f"norm {step}"] = train_step(
                wrapped, batches, step, optimization=optimization, strategy=strategy, settings=settings
            )
            with torch.no_grad():
                found[f"logits {step}"] = logits = model.eval()(input_ids=ids[0]).logits
        state.save(folder)
    weights = strategy.gather_model_state(model)
    plain = new_model(name).eval()
    plain.load_state_dict(weights)
    assert torch.equal(plain(input_ids=ids[0]).logits, logits), "the gathered state is not the model"
    return found | weights


# bart: tied embeddings, and several blocks that use the encoder's output. batch_norm: buffers.
@pytest.mark.parametrize("name", ["gpt2", "deep_bart", "batch_norm"])
def test_every_strategy_trains_to_the_same_bits_and_resumes_from_another(world, tmp_path, name):
    expected = train(["ddp"], world, name, tmp_path)
    for strategies in (["ddp", "zero1"], ["zero1", "zero2"], ["zero2", "zero3"], ["zero3", "ddp"]):
        assert_close(train(strategies, world, name, tmp_path), expected, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_sharded_model_is_never_placed_on_the_device_as_a_whole(world, monkeypatch, strategy, tmp_path):
    """It may not fit there: `fully_shard` moves one block at a time, and Trainer leaves the model where it is."""

    model, complete = new_model("bert"), new_model("bert")
    monkeypatch.setattr(PreTrainedModel, "to", Mock(side_effect=AssertionError("the complete model is moved")))
    select_strategy(Settings(strategy=strategy), batch_plan(), world).wrap(model)
    Trainer(complete, TrainingArgumentsWithoutPlacement(str(tmp_path), use_cpu=True, report_to="none"))
    with pytest.raises(AssertionError, match="moved"):
        select_strategy(Settings(), batch_plan(), world).wrap(complete)
