"""What recipes have in common: names, counts, and the same initial weights."""

from __future__ import annotations

import torch
from transformers import BertConfig, BertForSequenceClassification

from app.bench.speed.recipe import Count, CountingCollator, plain_copy, precision_of


def test_the_precision_is_part_of_the_name():
    assert [precision_of(name) for name in ("ddp_loop", "ddp_loop-bf16")] == ["fp32", "bf16"]


def test_batches_are_counted_when_they_have_been_trained_on():
    collator = CountingCollator(lambda mask: {"attention_mask": torch.tensor(mask)})
    for mask in ([[1, 1, 0], [1, 0, 0]], [[1]], [[1, 1]]):  # the last one was loaded in advance
        collator(mask)
    assert collator.count(2) == Count(examples=3, tokens=4, padded_tokens=7)
    collator([[1, 0]])
    assert collator.count(2) == Count(examples=2, tokens=3, padded_tokens=4)


def test_counts_are_added_over_the_ranks(world):
    assert Count(3, 4, 7).summed(world) == Count(3, 4, 7)


def test_a_plain_copy_has_the_same_weights_and_nothing_of_ours():
    config = BertConfig(
        num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=16, num_labels=3
    )
    config._attn_implementation = "eager"
    model = BertForSequenceClassification(config)
    model.register_forward_hook(lambda *_: None)
    plain = plain_copy(model)
    assert plain.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "eager"
    assert not plain._forward_hooks
    assert plain.num_labels == 3
    weights, copied = model.state_dict(), plain.state_dict()
    assert weights.keys() == copied.keys()
    assert all(torch.equal(weights[name], copied[name]) for name in weights)
    assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in plain.parameters()}
