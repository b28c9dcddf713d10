"""A model with the embeddings of some tokens only trains like the complete one, bit by bit."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from helpers.architectures import CONFIGS
from transformers import AutoModelForSequenceClassification, BertTokenizer, PreTrainedModel, set_seed

from app.model.vocabulary import complete_state, embeddings_to_trim, tokens_of_model, trim_vocabulary
from app.training.step import parameter_groups

SIZE, END = 97, 3
TOKENS = np.array([0, 1, 2, END, 5, 8, 13, 21, 34, 55, 89, 96])
RATES, DECAY = [0.01, 0.003, 0.02], 0.1


def build(name: str) -> PreTrainedModel:
    set_seed(0)
    ids = {"vocab_size": SIZE, "pad_token_id": 0, "eos_token_id": END, "bos_token_id": 2}
    config = CONFIGS[name].__class__(**(CONFIGS[name].to_diff_dict() | ids))
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config)
    return model.train()


def train(model: PreTrainedModel) -> list[float]:
    """Train with AdamW, and return the losses."""
    optimizer = torch.optim.AdamW(parameter_groups(model, DECAY), fused=True)
    losses = []
    for step, rate in enumerate(RATES):
        for group in optimizer.param_groups:
            group["lr"] = rate
        set_seed(step)  # dropout
        ids = torch.from_numpy(np.random.default_rng(step).choice(TOKENS[4:], (4, 10)))
        ids[:, -3:], ids[:, -1] = 0, END
        loss = model(input_ids=ids, attention_mask=(ids != 0).long(), labels=torch.tensor([0, 1, 1, 0])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in CONFIGS), ("bert", torch.float64)])
def test_a_trimmed_model_trains_bitwise_like_the_complete_one(name, dtype):
    complete, trimmed = build(name).to(dtype), build(name).to(dtype)
    trim_vocabulary(trimmed, TOKENS, keep_unused=True)
    vocabulary = trimmed.trimmed_vocabulary
    assert len(trimmed.get_input_embeddings().weight) == len(TOKENS)
    assert train(trimmed) == train(complete)
    vocabulary.decay(RATES, DECAY)
    state, expected = complete_state(trimmed, trimmed.state_dict()), complete.state_dict()
    assert state.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(state[key], expected[key])] == []


def test_other_ranks_keep_no_unused_rows_and_an_unexpected_token_is_an_error():
    model = build("bert")
    trim_vocabulary(model, TOKENS, keep_unused=False)
    vocabulary = model.trimmed_vocabulary
    vocabulary.decay(RATES, DECAY)
    assert vocabulary.rows is None
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[1, 4]]))


@pytest.mark.parametrize("padding_idx", [4, int(TOKENS[6])])
def test_the_padding_row_is_not_trained_whether_or_not_the_model_keeps_it(padding_idx):
    complete, trimmed = build("bert"), build("bert")
    for model in (complete, trimmed):
        model.get_input_embeddings().padding_idx = padding_idx
    trim_vocabulary(trimmed, TOKENS, keep_unused=True)
    assert train(trimmed) == train(complete)
    trimmed.zero_grad()
    trimmed(input_ids=torch.from_numpy(TOKENS[None])).logits.sum().backward()
    untrained = (trimmed.get_input_embeddings().weight.grad == 0).all(dim=1).nonzero().flatten().tolist()
    assert untrained == ([6] if padding_idx in TOKENS else [])


@pytest.mark.parametrize("use", ["tied", "frozen"])
def test_a_matrix_that_is_not_only_a_trained_embedding_is_not_trimmed(use):
    model = build("bert")
    assert len(embeddings_to_trim(model, len(TOKENS))) == 1
    assert embeddings_to_trim(model, SIZE - 3) == [], "not worthwhile"
    embeddings = model.get_input_embeddings()
    if use == "tied":
        model.head = torch.nn.Linear(32, SIZE)
        model.head.weight = embeddings.weight
    else:
        embeddings.weight.requires_grad_(False)
    assert embeddings_to_trim(model, len(TOKENS)) == []
    assert complete_state(model, model.state_dict()).keys() == model.state_dict().keys()


def test_tokens_of_a_model_include_its_special_ones(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(["一", "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"二三四五"]))
    tokenizer = BertTokenizer(str(tmp_path / "vocab.txt"))
    config = copy.deepcopy(CONFIGS["bert"])
    config.vocab_size, config.pad_token_id, config.eos_token_id = 10, 1, [8, 10]  # 10 is not in the vocabulary
    tokens = tokens_of_model(np.array([2, 3, 6]), tokenizer, config)
    assert tokens.tolist() == [0, 1, 2, 3, 4, 5, 6, 8], "0 is the type of all tokens, which GPT-2 embeds as a token"
