"""ZeRO-2 and ZeRO-3: which modules are gathered together, and that gradients and state survive the sharding."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from helpers.architectures import CONFIGS
from helpers.gradients import add_neighbors, flat_gradients, gradients_of_logical_ranks
from helpers.worlds import ThreadNetwork, batch_plan, process_group_of
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AlbertConfig, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from app.common.errors import AgreedError
from app.settings import Settings
from app.strategies import reduction
from app.strategies.base import local_part, rows_of, transformer_blocks
from app.strategies.fsdp import FullyShardStrategy, PairwiseReduceScatter, ShardedModel

ALBERT = AlbertConfig(
    embedding_size=16, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32
)


def tiny(name: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = copy.deepcopy(ALBERT if name == "albert" else CONFIGS[name])
    config.vocab_size = 50
    return AutoModelForSequenceClassification.from_config(config)


def kinds(blocks: list[nn.Module]) -> list[str]:
    return [type(block).__name__ for block in blocks]


# ---- blocks ----------------------------------------------------------------------------------------------------------


def test_each_transformer_layer_is_a_block():
    assert kinds(transformer_blocks(tiny("bert"))) == ["BertLayer", "BertLayer", "BertEmbeddings"]
    assert kinds(transformer_blocks(tiny("gpt2"))) == ["GPT2Block", "GPT2Block"]
    assert kinds(transformer_blocks(tiny("bart"))) == ["BartDecoderLayer", "BartEncoderLayer"]


def test_layers_that_run_several_times_in_a_forward_pass_are_no_blocks(monkeypatch):
    """Their gradients would be reduced after the first of several uses in the backward pass."""
    model = tiny("albert")
    assert transformer_blocks(model) == []
    monkeypatch.setattr(model, "_no_split_modules", {"AlbertLayer"})
    assert kinds([module for module in model.modules() if type(module).__name__ == "AlbertLayer"]) == ["AlbertLayer"]
    assert transformer_blocks(model) == []


def test_a_model_that_lists_no_layers_is_gathered_as_a_whole(monkeypatch):
    model = tiny("electra")
    monkeypatch.setattr(model, "_no_split_modules", None)
    assert transformer_blocks(model) == []
    monkeypatch.setattr(model, "_no_split_modules", ["ElectraLayer"])
    assert kinds(transformer_blocks(model)) == ["ElectraLayer", "ElectraLayer"]


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


def test_a_block_with_tied_embeddings_belongs_to_the_rest_of_the_model(monkeypatch):
    model = tiny("bart")
    assert model.model.encoder.embed_tokens.weight is model.model.decoder.embed_tokens.weight
    names = ["BartEncoderLayer", "BartDecoderLayer", "BartScaledWordEmbedding", "BartLearnedPositionalEmbedding"]
    monkeypatch.setattr(model, "_no_split_modules", names)
    found = kinds(transformer_blocks(model))
    assert "BartScaledWordEmbedding" not in found
    assert found.count("BartLearnedPositionalEmbedding") == 2, "these are not tied"


# ---- the wrapped model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "gpt2", "bart", "albert", "batch_norm"])
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_every_parameter_is_sharded(name, strategy):
    source = {key: tensor.clone() for key, tensor in tiny(name).state_dict().items()}
    for rank in range(3):
        with process_group_of(rank, 3) as world:
            model = tiny(name)
            blocks = transformer_blocks(model)
            plain = dict(model.named_parameters())
            wrapped = FullyShardStrategy(Settings(strategy=strategy), batch_plan(3), world)
            module = wrapped.wrap(model)
            assert type(module) is ShardedModel
            assert module.module is model
            assert all(isinstance(block, FSDPModule) for block in (*blocks, model))
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            assert dict(model.named_parameters()).keys() == plain.keys(), "tied parameters are still tied"
            for key, tensor in model.state_dict().items():
                start, length = rows_of(tensor)
                expected = source[key] if start is None else source[key][start : start + length]
                assert torch.equal(local_part(tensor), expected), key
            assert all(parameter.requires_grad for parameter in model.parameters())


class TwoBlocksConfig(PreTrainedConfig):
    model_type = "two-blocks"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class TwoBlocks(PreTrainedModel):
    """Two blocks, of which the second one can be left out."""

    config_class = TwoBlocksConfig
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__(TwoBlocksConfig(num_hidden_layers=2))
        self.first, self.second, self.out = Block(), Block(), nn.Linear(6, 2)
        self.post_init()

    def forward(self, x: torch.Tensor, use_second: bool = True) -> torch.Tensor:
        hidden = self.first(x)
        return self.out(self.second(hidden) if use_second else hidden).square().mean()


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    "uses", [[True], [True] * 2, [True] * 8, [True, False], [False, True], [False, True, False, False]]
)
def test_a_process_adds_the_gradients_of_its_logical_ranks_as_a_tree(strategy, accumulation, uses):
    """A parameter that only some of the logical ranks use gets their gradients."""
    n = len(uses) * accumulation
    with process_group_of(0, 1) as world:
        torch.manual_seed(0)
        plain = TwoBlocks()
        model = copy.deepcopy(plain)
        zero = FullyShardStrategy(Settings(strategy=strategy), batch_plan(1, len(uses), accumulation), world)
        wrapped = zero.wrap(model)
        for _ in range(2):  # nothing of a step may remain in the next one
            inputs = torch.randn(len(uses), accumulation, 4, 6)
            leaves = gradients_of_logical_ranks(plain, inputs, uses)
            for number, x in enumerate(inputs.flatten(0, 1)):
                with zero.accumulate(wrapped, number):
                    (wrapped(x, uses[number // accumulation]) / n).backward()
            found = local_part(flat_gradients(list(model.parameters())))
            assert torch.equal(found, add_neighbors(leaves))
            if len(uses) == 8:
                assert not torch.equal(found, sum(leaves)), "the order of the additions makes no difference here"
            wrapped.zero_grad()


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("logical_ranks", [1, 2])
@pytest.mark.parametrize("allowed", [False, True])
def test_a_parameter_without_a_gradient_is_an_error_in_the_first_step_as_with_ddp(strategy, logical_ranks, allowed):
    with process_group_of(0, 1) as world:
        settings = Settings(strategy=strategy, ddp_find_unused_parameters=allowed)
        zero = FullyShardStrategy(settings, batch_plan(1, logical_ranks), world)
        wrapped = zero.wrap(TwoBlocks())

        def step() -> None:
            for number in range(logical_ranks):
                with zero.accumulate(wrapped, number):
                    wrapped(torch.randn(4, 6), False).backward()

        if allowed:
            step()
        else:
            with pytest.raises(AgreedError, match=r"2 of the model's parameters, such as second\.linear\.weight, take"):
                step()


@pytest.mark.parametrize(("ranks", "inside"), [(1, None), (2, None), (3, None), (4, None), (8, None), (4, 2), (8, 4)])
def test_each_rank_gets_its_shard_of_the_average(monkeypatch, ranks, inside):
    inputs = [torch.randn(ranks * 5, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
    network = ThreadNetwork(ranks)
    monkeypatch.setattr(reduction, "dist", network)
    group = SimpleNamespace(size=lambda: ranks)

    def reduce(rank: int) -> torch.Tensor:
        comm = PairwiseReduceScatter(network.world(rank, inside).levels)
        output = comm.allocate((5,), dtype=torch.float32, device=torch.device("cpu"))
        comm(output, inputs[rank].clone(), group, op=None)
        return output

    shards = network.run(reduce)
    assert torch.equal(torch.cat(shards), add_neighbors(inputs) / ranks)


@pytest.mark.parametrize(("ranks", "inside"), [(2, None), (3, None), (8, None), (8, 4)])
def test_each_rank_gets_its_shard_of_the_rounded_average(monkeypatch, ranks, inside):
    """Each rank's gradient is rounded once it is divided, and so is each sum in the tree."""
    inputs = [torch.randn(ranks * 5, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
    network = ThreadNetwork(ranks)
    monkeypatch.setattr(reduction, "dist", network)
    group = SimpleNamespace(size=lambda: ranks)

    def reduce(rank: int) -> torch.Tensor:
        comm = PairwiseReduceScatter(network.world(rank, inside).levels, torch.bfloat16)
        output = comm.allocate((5,), dtype=torch.float32, device=torch.device("cpu"))
        comm(output, inputs[rank].clone(), group, op=None)
        return output

    found = torch.cat(network.run(reduce))
    expected = add_neighbors([(one / ranks).bfloat16() for one in inputs])
    assert expected.dtype is torch.bfloat16
    assert torch.equal(found, expected.float())
    assert not torch.equal(found, add_neighbors(inputs) / ranks)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("uses", [[True], [True] * 8, [True, False], [False, True, False, False]])
def test_a_process_rounds_the_gradients_of_its_logical_ranks_and_their_sums(strategy, accumulation, uses):
    """A gradient is rounded when all micro-batches of its logical rank are added, even on a single rank."""
    n = len(uses) * accumulation
    with process_group_of(0, 1) as world:
        torch.manual_seed(0)
        plain = TwoBlocks()
        model = copy.deepcopy(plain)
        zero = FullyShardStrategy(
            Settings(strategy=strategy, reduce_dtype="bf16"), batch_plan(1, len(uses), accumulation), world
        )
        wrapped = zero.wrap(model)
        for _ in range(2):
            inputs = torch.randn(len(uses), accumulation, 4, 6)
            leaves = gradients_of_logical_ranks(plain, inputs, uses)
            for number, x in enumerate(inputs.flatten(0, 1)):
                with zero.accumulate(wrapped, number):
                    (wrapped(x, uses[number // accumulation]) / n).backward()
            found = local_part(flat_gradients(list(model.parameters())))
            assert torch.equal(found, add_neighbors([leaf.bfloat16() for leaf in leaves]).float())
            assert not torch.equal(found, add_neighbors(leaves))
            wrapped.zero_grad()


class Sees(nn.Linear):
    """A layer that notes the dtype of its weights in each forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.weight.dtype
        return super().forward(x)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("param_dtype", ["fp32", "bf16"])
def test_only_gathered_parameters_are_in_bf16(strategy, param_dtype):
    with process_group_of(0, 1) as world:
        settings = Settings(strategy=strategy, precision="bf16", param_dtype=param_dtype)
        zero, model = FullyShardStrategy(settings, batch_plan(1, 2, 2), world), TwoBlocks()
        model.first.linear = Sees(6, 6)
        with torch.no_grad():
            model.first.linear.weight.fill_(1 + 2**-20)
        wrapped = zero.wrap(model)
        for number in range(4):
            with zero.accumulate(wrapped, number):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = wrapped(torch.randn(4, 6))
                loss.backward()
        assert model.first.linear.seen is (torch.bfloat16 if param_dtype == "bf16" else torch.float32)
        for parameter in model.parameters():
            assert local_part(parameter).dtype is local_part(parameter.grad).dtype is torch.float32
        assert (local_part(model.first.linear.weight) == 1 + 2**-20).all(), "the shards are not rounded"


def test_adamw_updates_local_tensors_to_the_bits_of_dtensors(monkeypatch):
    processed = []
    fused = torch._fused_adamw_
    monkeypatch.setattr(
        torch, "_fused_adamw_", lambda *args, **options: [processed.append(args), fused(*args, **options)]
    )
    with process_group_of(0, 1) as world:
        settings = Settings(strategy="zero3")
        results = []
        for build in (FullyShardStrategy(settings, batch_plan(1), world).build_optimizer, torch.optim.AdamW):
            model = FullyShardStrategy(settings, batch_plan(1), world).wrap(tiny("bert")).module
            parameters = list(model.parameters())
            optimizer = build([{"params": parameters[:3]}, {"params": parameters[3:]}], lr=0.1, fused=True)
            for step in range(3):
                for parameter in parameters:
                    parameter.grad = parameter.detach() * (step + 0.5)
                optimizer.step()
            states = [value for parameter in parameters for value in (parameter, *optimizer.state[parameter].values())]
            assert sum(isinstance(value, DTensor) for value in states) == 3 * len(parameters), "weights and moments"
            results.append([local_part(value).clone() for value in states])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    lists = [tensors for args in processed[: len(processed) // 2] for tensors in args]
    assert lists
    assert not any(isinstance(tensor, DTensor) for tensors in lists for tensor in tensors)
