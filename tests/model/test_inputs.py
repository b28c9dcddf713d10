"""The inputs of a model: the same bits as with the mask of the batch, and no wait of the host for a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.architectures import CONFIGS, PAIR, SMALL
from helpers.worlds import batch_plan, fake_world, process_group_of
from torch.overrides import _is_torch_function_mode_enabled
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AlbertConfig,
    AutoModelForSequenceClassification,
    CamembertConfig,
    ErnieConfig,
    LlamaConfig,
    MBartConfig,
    MegatronBertConfig,
    MobileBertConfig,
    PreTrainedModel,
    RobertaPreLayerNormConfig,
    XLMRobertaConfig,
    XLMRobertaXLConfig,
)

from app.distributed import collectives
from app.distributed.world import World
from app.model import inputs
from app.model.inputs import (
    BIDIRECTIONAL,
    CAUSAL,
    ENCODER_DECODERS,
    ENCODERS,
    WaitBeforeReads,
    expand_mask,
    to_device,
    wait_before_reads,
)
from app.settings import Settings
from app.strategies.fsdp import FullyShardStrategy

FURTHER = {
    "albert": AlbertConfig(**SMALL, embedding_size=16),
    "camembert": CamembertConfig(**SMALL),
    "ernie": ErnieConfig(**SMALL),
    "llama": LlamaConfig(**SMALL),
    "mbart": MBartConfig(d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, **PAIR),
    "megatron_bert": MegatronBertConfig(**SMALL),
    "mobilebert": MobileBertConfig(**SMALL, embedding_size=16, intra_bottleneck_size=32, true_hidden_size=32),
    "roberta_prelayernorm": RobertaPreLayerNormConfig(**SMALL),
    "xlm_roberta": XLMRobertaConfig(**SMALL),
    "xlm_roberta_xl": XLMRobertaXLConfig(**SMALL),
}
LISTED = {name.split(".")[2] for name in BIDIRECTIONAL}
DECODERS = sorted(name.split(".")[2] for name in CAUSAL)
LENGTH, VOCABULARY, PAD = 37, 60, 1


def classifier(name: str, **changes: Any) -> PreTrainedModel:
    config = copy.deepcopy((CONFIGS | FURTHER)[name])
    config.vocab_size, config.pad_token_id, config.eos_token_id = VOCABULARY, PAD, 2
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config)
    return model


def batch_of(name: str, lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (len(lengths), LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    ids[~mask] = PAD
    for row, length in enumerate(lengths):
        ids[row, length - 1] = 2  # BART and T5 classify the end of the text
    batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.arange(len(lengths)) % 2}
    if name == "fnet":
        del batch["attention_mask"]
    return batch


def results(model: PreTrainedModel, batch: dict[str, torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the logits, the loss and all gradients."""
    model.zero_grad()
    torch.manual_seed(2)  # dropout
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        outputs = model(**batch)
    outputs.loss.backward()
    return [outputs.logits, outputs.loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("lengths", [(LENGTH, 20, 5, 30), (LENGTH,) * 4], ids=["padded", "full"])
@pytest.mark.parametrize("name", [*CONFIGS, *FURTHER])
def test_results_are_bitwise_those_with_the_mask_of_the_batch(name, lengths):
    model, batch = classifier(name), batch_of(name, lengths)
    prepared = to_device(batch, model, fake_world())
    for dtype in (torch.float32, torch.bfloat16):
        for training in (True, False):
            model.train(training)
            expected, actual = results(model, batch, dtype), results(model, prepared, dtype)
            assert len(expected) == len(actual)
            assert all(map(torch.equal, expected, actual)), f"{dtype}, training: {training}"


def test_every_architecture_of_the_list_is_compared_above():
    models = [classifier(name) for name in CONFIGS | FURTHER]
    assert {type(model).forward.__module__ for model in models} >= ENCODERS | ENCODER_DECODERS
    assert {type(model.base_model).forward.__module__ for model in models} >= CAUSAL


class WithoutHostReads(TorchDispatchMode):
    """Refuse operations for whose result the host would wait on a GPU."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert operation not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        assert not (operation is torch.ops.aten.index.Tensor and args[1][0].dtype is torch.bool)
        return operation(*args, **(kwargs or {}))


class CountedHostReads(TorchDispatchMode):
    """Count the values that the host reads."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operation in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", sorted(LISTED - {"megatron_bert"}))
def test_the_forward_pass_reads_no_value_of_the_mask(name):
    model = classifier(name)
    for lengths in ((LENGTH, 20), (LENGTH, LENGTH)):
        batch = batch_of(name, lengths)
        prepared = to_device(batch, model, fake_world())
        with WithoutHostReads():
            model(**prepared)
        with pytest.raises(AssertionError), WithoutHostReads():
            model(**batch)


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_reads_one_value_and_none_with_padding(name):
    model = classifier(name)
    padded, full = (to_device(batch_of(name, (LENGTH, length)), model, fake_world()) for length in (20, LENGTH))
    with WithoutHostReads():
        model(**padded)
    with CountedHostReads() as reads:
        model(**full)
    assert reads.count == 1


def test_a_batch_without_padding_needs_no_mask_and_the_batch_itself_keeps_its_mask():
    model, batch = classifier("modernbert"), batch_of("modernbert", (LENGTH, LENGTH))
    assert to_device(batch, model, fake_world()).keys() == {"input_ids", "labels"}
    assert batch["attention_mask"].shape == (2, LENGTH)


@pytest.mark.parametrize("name", ["modernbert", "t5", "xlnet"])
def test_models_that_use_the_mask_in_other_ways_get_it_unchanged(name):
    batch = batch_of(name, (LENGTH, 20))
    assert torch.equal(to_device(batch, classifier(name), fake_world())["attention_mask"], batch["attention_mask"])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bert", {"_attn_implementation": "eager"}),
        ("bert", {"is_decoder": True}),
        ("gpt2", {"_attn_implementation": "eager"}),
        ("gpt2", {"is_causal": False}),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}),
    ],
)
def test_models_with_another_kind_of_attention_get_the_mask_of_tokens(name, changes):
    model = classifier(name, **changes)
    assert to_device(batch_of(name, (LENGTH, 20)), model, fake_world())["attention_mask"].ndim == 2


def test_a_sharded_model_gets_the_same_mask():
    with process_group_of(0, 2) as world:
        model = classifier("bert")
        FullyShardStrategy(Settings(strategy="zero3"), batch_plan(2), world).wrap(model)
        assert type(model).__name__ == "FSDPBertForSequenceClassification"
        assert expand_mask(batch_of("bert", (LENGTH, 20)), model)["attention_mask"].ndim == 4


def waits_of(name: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how often a model on a GPU, here on the CPU, waits where a failed rank is noticed."""
    waits: list[World] = []
    monkeypatch.setattr(inputs, "wait_for_device", waits.append)
    monkeypatch.setattr(inputs, "WaitBeforeReads", lambda world: WaitBeforeReads(fake_world()))
    model = classifier(name)
    wait_before_reads(model, fake_world(device="cuda:0"))
    model(**to_device(batch_of(name, lengths), model, fake_world()))
    assert not _is_torch_function_mode_enabled()
    return len(waits)


@pytest.mark.parametrize(
    ("name", "lengths", "expected"),
    [
        ("bert", (LENGTH, LENGTH), 0),
        ("bert", (LENGTH, 20), 0),
        ("gpt2", (LENGTH, LENGTH), 1),
        ("gpt2", (LENGTH, 20), 0),
        ("modernbert", (LENGTH, LENGTH), 0),
        ("modernbert", (LENGTH, 20), 2),  # for two masks
        ("bart", (LENGTH, 20), 3),  # for the mask of the decoder, and twice for the positions of the end of the text
    ],
)
def test_a_model_that_reads_from_the_gpu_waits_where_a_failed_rank_is_noticed(name, lengths, expected, monkeypatch):
    assert waits_of(name, lengths, monkeypatch) == expected


def test_operations_are_intercepted_during_the_forward_pass_only_even_if_it_raises():
    model = classifier("gpt2")
    wait_before_reads(model, fake_world(device="cuda:0"))
    during = []
    model.transformer.wte.register_forward_hook(lambda *_: during.append(_is_torch_function_mode_enabled()))
    batch = batch_of("gpt2", (LENGTH, LENGTH))
    model(**batch)
    batch["labels"] += 9
    with pytest.raises(IndexError):
        model(**batch)
    assert during == [True, True]
    assert not _is_torch_function_mode_enabled()


READ = torch.tensor([2, 0, 1])


@pytest.mark.parametrize(
    ("read", "waits"),
    [
        (lambda: bool(READ.any()), 1),
        (lambda: READ[0].item(), 1),
        (lambda: READ.tolist(), 1),
        (lambda: 1 in READ, 1),
        (lambda: READ.nonzero(), 1),
        (lambda: torch.where(READ > 0), 1),
        (lambda: torch.unique(READ), 1),
        (lambda: torch.unique_consecutive(READ), 1),
        (lambda: torch.nonzero(input=READ), 1),
        (lambda: READ[READ > 0], 1),
        (lambda: READ[None][:, READ > 0], 1),
        (lambda: READ[READ], 0),
        (lambda: READ[1:] + READ.sum(), 0),
        (lambda: torch.where(READ > 0, READ, 0), 0),
    ],
)
def test_each_read_waits_once(read, waits, monkeypatch):
    waited: list[World] = []
    monkeypatch.setattr(inputs, "wait_for_device", waited.append)
    for world, expected in ((fake_world(), waits), (fake_world(device="cuda:0"), 0)):  # READ is on the CPU
        waited.clear()
        with WaitBeforeReads(world):
            read()
        assert waited == [world] * expected


def test_rows_are_gathered_only_after_the_device_is_done(monkeypatch):
    waits = []
    monkeypatch.setattr(collectives, "wait_for_device", waits.append)
    with process_group_of(0, 1) as world:
        collectives.gather_rows([1, 0], torch.ones(2, 3, dtype=torch.float64), 2, world=world)
        assert waits == [world]
