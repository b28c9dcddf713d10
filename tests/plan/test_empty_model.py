"""The memory of activations is counted without computing them."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    HeliumConfig,
    LongformerConfig,
    MixtralConfig,
    PreTrainedConfig,
    RoFormerConfig,
)

from app.common.errors import UserError
from app.model.dropout import RowDropout, checkpoint_activations
from app.plan.empty_model import run_micro_batch, without_data
from app.settings import Settings

SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
CPU = torch.device("cpu")


def measure(config: PreTrainedConfig, rows: int, length: int, precision: str, checkpointing: bool) -> tuple[int, int]:
    """What the allocator has given out and not got back: at the end of the forward pass, and at most."""
    model = AutoModelForSequenceClassification.from_config(config).train()
    if checkpointing:
        checkpoint_activations(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.zeros(rows, length, dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[0, -1] = 0  # without padding, attention needs no mask
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.zeros(rows, dtype=torch.int64)}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        range_, mixed = torch.profiler.record_function("forward"), torch.autocast("cpu", enabled=precision == "bf16")
        with range_, mixed, RowDropout(42, 0, range(rows)):
            loss = model(**batch).loss
        loss.backward()
    events = profiler.profiler.kineto_results.events()
    (forward,) = (event for event in events if event.name() == "forward")
    end = forward.start_ns() + forward.duration_ns()
    live = peak = saved = 0
    for time, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        live += size
        peak = max(peak, live)
        if time <= end:
            saved = live
    return saved, peak


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_counted_activations_are_those_that_the_allocator_gives_out(precision, checkpointing):
    config = BertConfig(**SMALL)
    settings = Settings(max_length=64, precision=precision, activation_checkpointing=checkpointing)
    counted = run_micro_batch(settings, config, rows=32, device=CPU)
    saved, peak = measure(config, 32, 64, precision, checkpointing)
    assert counted.saved == pytest.approx(saved, rel=0.02)
    assert counted.peak == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_mixture_of_experts_is_counted_without_computing_it(precision):
    """PyTorch's own product of groups accepts only bf16 without data."""
    config = MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0)
    counted = run_micro_batch(Settings(max_length=64, precision=precision), config, rows=32, device=CPU)
    saved, peak = measure(config, 32, 64, precision, checkpointing=False)
    assert counted.saved == pytest.approx(saved, rel=0.05)
    assert counted.peak == pytest.approx(peak, rel=0.05)


def test_parameters_that_are_not_trained_need_no_gradient():
    assert (
        run_micro_batch(Settings(max_length=16), RoFormerConfig(**SMALL, embedding_size=32), rows=2, device=CPU).saved
        > 0
    )


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        # Its attention heads don't fill the hidden size.
        (HeliumConfig(**SMALL, num_key_value_heads=4, head_dim=16), "cannot be planned, because its own code fails: "),
        (LongformerConfig(**SMALL), "cannot be planned, because its computation depends on the values of tensors"),
    ],
    ids=["helium", "longformer"],
)
def test_an_error_in_the_code_of_a_model_is_one_line(config, problem, capfd):
    with pytest.raises(UserError, match=problem):
        run_micro_batch(Settings(max_length=16), config, rows=2, device=CPU)
    assert "Traceback" not in capfd.readouterr().err, "PyTorch would log one of its own"


def test_an_internal_error_keeps_its_traceback():
    with pytest.raises(RuntimeError, match=r"reduction dim|shape"), without_data(CPU):
        torch.zeros(2, 3) @ torch.zeros(2, 3)


def test_checkpointing_keeps_less_and_more_rows_keep_more():
    config = BertConfig(**SMALL)
    few, many = (run_micro_batch(Settings(max_length=16), config, rows=rows, device=CPU) for rows in (2, 4))
    assert 1.8 * few.saved < many.saved < 2.1 * few.saved
    checkpointed = Settings(max_length=16, activation_checkpointing=True)
    assert run_micro_batch(checkpointed, config, rows=4, device=CPU).saved < many.saved / 4
    assert many.saved <= many.peak


def test_weights_of_any_size_need_no_memory():
    large = BertConfig(hidden_size=8192, num_hidden_layers=2, num_attention_heads=64, intermediate_size=32768)
    assert run_micro_batch(Settings(max_length=8), large, rows=1, device=CPU).saved > 0


def test_a_computation_that_depends_on_data_is_refused():
    with (
        pytest.raises(UserError, match=r"cannot be planned, because its computation depends on the values"),
        without_data(CPU),
    ):
        torch.ones(3).sum().item()
