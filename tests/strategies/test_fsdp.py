"""ZeRO-2 and ZeRO-3: which modules are gathered together, and which shard each rank gets."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from helpers.architectures import CONFIGS
from helpers.worlds import batch_plan, process_group_of
from strategies.gradients import add_neighbors
from strategies.thread_network import ThreadNetwork
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AlbertConfig, AutoModelForSequenceClassification, PreTrainedModel

from app.settings import Settings
from app.strategies import reduction
from app.strategies.base import local_part, rows_of, transformer_blocks
from app.strategies.fsdp import FullyShardStrategy, PairwiseReduceScatter

ALBERT = AlbertConfig(
    embedding_size=16, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32
)


def tiny(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = copy.deepcopy(ALBERT if name == "albert" else CONFIGS[name])
    config.vocab_size = 50
    return AutoModelForSequenceClassification.from_config(config)


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
        ("bart", ["BartEncoderLayer", "BartScaledWordEmbedding", POSITIONS], ["BartEncoderLayer", *[POSITIONS] * 2]),
    ],
)
def test_each_transformer_layer_is_a_block(monkeypatch, name, classes, expected):
    model = tiny(name)
    if classes is not LISTED:
        monkeypatch.setattr(model, "_no_split_modules", classes)
    found = [type(block).__name__ for block in transformer_blocks(model)]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("name", [*CONFIGS, "albert"])
def test_no_parameter_of_a_block_is_used_elsewhere_and_inner_blocks_come_first(name):
    model = tiny(name)
    blocks = transformer_blocks(model)
    names = {id(block): name for name, block in model.named_modules()}
    for i, block in enumerate(blocks):
        inside = {id(parameter) for parameter in block.parameters()}
        outside = [
            full_name
            for full_name, parameter in model.named_parameters(remove_duplicate=False)
            if id(parameter) in inside and not full_name.startswith(f"{names[id(block)]}.")
        ]
        assert not outside, f"{names[id(block)]} shares parameters with {outside}"
        for later in blocks[i + 1 :]:
            assert later not in set(block.modules()), "fully_shard must be applied to the inner module first"


# ---- shards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "gpt2", "bart", "albert", "batch_norm"])
def test_every_parameter_is_sharded(name):
    source = {key: tensor.clone() for key, tensor in tiny(name).state_dict().items()}
    for rank in range(3):
        with process_group_of(rank, 3) as world:
            model = tiny(name)
            blocks, names = transformer_blocks(model), dict(model.named_parameters()).keys()
            FullyShardStrategy(Settings(strategy="zero3"), batch_plan(3), world).wrap(model)
            assert all(isinstance(block, FSDPModule) for block in (*blocks, model))
            assert all(isinstance(parameter, DTensor) and parameter.requires_grad for parameter in model.parameters())
            assert dict(model.named_parameters()).keys() == names, "tied parameters are still tied"
            for key, tensor in model.state_dict().items():
                start, length = rows_of(tensor)
                expected = source[key] if start is None else source[key][start : start + length]
                assert torch.equal(local_part(tensor), expected), key


LAYOUTS = [(1, None), (2, None), (3, None), (4, None), (8, None), (4, 2), (6, 2), (6, 3), (8, 2), (8, 4), (16, 4)]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "inside"), LAYOUTS)
def test_each_rank_gets_its_shard_of_the_average(monkeypatch, ranks, inside, dtype):
    """With a dtype, each rank's gradient is rounded once it is divided, and so is each sum in the tree."""
    inputs = [torch.randn(ranks * 5, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
    network = ThreadNetwork(ranks)
    monkeypatch.setattr(reduction, "dist", network)
    group = SimpleNamespace(size=lambda: ranks)

    def reduce(rank: int) -> torch.Tensor:
        comm = PairwiseReduceScatter(network.world(rank, inside).levels, dtype)
        output = comm.allocate((5,), dtype=torch.float32, device=torch.device("cpu"))
        comm(output, inputs[rank].clone(), group, op=None)
        return output

    found, exact = torch.cat(network.run(reduce)), add_neighbors(inputs) / ranks
    rounded = add_neighbors([(one / ranks).bfloat16() for one in inputs]).float()
    assert not torch.equal(rounded, exact)
    assert torch.equal(found, exact if dtype is None else rounded)
