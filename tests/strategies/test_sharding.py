"""Which modules are gathered together, which shard each rank gets, and where in memory it is."""

from __future__ import annotations

import pytest
from helpers.architectures import CONFIGS
from helpers.worlds import batch_plan, process_group_of
from strategies.test_select import new_model

from app.settings import Settings
from app.strategies.base import transformer_blocks
from app.strategies.ddp import Zero1Strategy
from app.training.step import parameter_groups

# ---- blocks ----------------------------------------------------------------------------------------------------------

LISTED = object()  # the classes that the model itself lists in `_no_split_modules`
POSITIONS = "BartLearnedPositionalEmbedding"


@pytest.mark.parametrize(
    ("name", "classes", "expected"),
    [
        ("bert", LISTED, ["BertLayer", "BertLayer", "BertEmbeddings"]),
        ("gpt2", LISTED, ["GPT2Block", "GPT2Block"]),
        ("bart", LISTED, ["BartDecoderLayer", "BartEncoderLayer"]),
        ("electra", ["ElectraLayer"], ["ElectraLayer", "ElectraLayer"]),
        ("electra", None, []),  # gathered as a whole
        # One layer runs several times: its gradient would be reduced after the first of them in the backward pass.
        ("albert", LISTED, []),
        ("albert", {"AlbertLayer"}, []),
        # The word embeddings are tied, so they belong to the rest of the model; those of positions are not.
        (
            "bart",
            ["BartEncoderLayer", "BartScaledWordEmbedding", POSITIONS],
            [POSITIONS, "BartEncoderLayer", POSITIONS],
        ),
        # fully_shard must be applied to the inner module first.
        ("bert", ["BertLayer", "BertAttention"], ["BertAttention", "BertLayer"] * 2),
    ],
)
def test_each_transformer_layer_that_shares_no_parameters_is_a_block(monkeypatch, name, classes, expected):
    model = new_model(name)
    if classes is not LISTED:
        monkeypatch.setattr(model, "_no_split_modules", classes)
    assert [type(block).__name__ for block in transformer_blocks(model)] == expected


# ---- shards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_stay_aligned_under_zero1(name):
    """GPU kernels that load 16 bytes at once would otherwise be replaced by others, which round differently."""
    for ranks in (1, 2, 4):
        model = new_model(name)
        with process_group_of(0, ranks) as world:
            strategy = Zero1Strategy(Settings(strategy="zero1"), batch_plan(ranks), world)
            strategy.build_optimizer(parameter_groups(model, weight_decay=0.01), lr=1e-3)
        assert any(parameter.storage_offset() for parameter in model.parameters()), "they are views of one tensor"
        assert [n for n, p in model.named_parameters() if p.storage_offset() * p.element_size() % 16] == []
