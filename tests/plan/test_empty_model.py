"""The memory of activations is counted without computing them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from helpers.architectures import SMALL as SIZES
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForSequenceClassification, BertConfig, HeliumConfig, LongformerConfig, MixtralConfig

from app.common.errors import UserError
from app.model.dropout import RowDropout, checkpoint_activations
from app.model.load import mixed_precision
from app.plan.empty_model import empty_batch, run_micro_batch
from app.settings import Settings

SMALL = SIZES | {"vocab_size": 100}
BERT = BertConfig(**SMALL)
# PyTorch's own product of groups accepts only bf16 without data.
EXPERTS = MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0)
ROWS, LENGTH, CPU = 32, 64, torch.device("cpu")


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Yield a list that gets, at the end of the block, the sizes that are allocated in it, and freed (negative)."""
    sizes: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield sizes
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes += [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("config", "checkpointing", "tolerance"),
    [(BERT, False, 0.02), (BERT, True, 0.02), (EXPERTS, False, 0.05)],
    ids=["bert", "checkpointing", "experts"],
)
def test_counted_activations_are_those_that_the_allocator_gives_out(config, precision, checkpointing, tolerance):
    settings = Settings(max_length=LENGTH, precision=precision, activation_checkpointing=checkpointing)
    counted = run_micro_batch(settings, config, rows=ROWS, device=CPU)

    model = AutoModelForSequenceClassification.from_config(config).train()
    if checkpointing:
        checkpoint_activations(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    batch = empty_batch(ROWS, LENGTH)
    batch["attention_mask"][0, -1] = 0  # without padding, attention needs no mask
    with allocations() as forward, mixed_precision(precision, CPU), RowDropout(42, 0, range(ROWS)):
        loss = model(**batch).loss
    with allocations() as backward:
        loss.backward()
    live = np.cumsum(forward + backward)
    assert (counted.saved, counted.peak) == pytest.approx((sum(forward), live.max()), rel=tolerance)


def test_weights_of_any_size_need_no_memory():
    large = BertConfig(hidden_size=65536, num_hidden_layers=2, num_attention_heads=64, intermediate_size=262144)
    assert run_micro_batch(Settings(max_length=8), large, rows=1, device=CPU).saved > 0


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        # Its attention heads don't fill the hidden size.
        (HeliumConfig(**SMALL, num_key_value_heads=2, head_dim=32), "cannot be planned, because its own code fails: "),
        (LongformerConfig(**SMALL), "cannot be planned, because its computation depends on the values of tensors"),
    ],
    ids=["helium", "longformer"],
)
def test_an_error_in_the_code_of_a_model_is_one_line(config, problem, capfd):
    with pytest.raises(UserError, match=problem):
        run_micro_batch(Settings(max_length=16), config, rows=2, device=CPU)
    assert "Traceback" not in capfd.readouterr().err, "PyTorch would log one of its own"
