"""The built-in models."""

from __future__ import annotations

import pytest
import torch

from app.common.errors import UserError
from app.data.reviews import read_reviews
from app.model.load import load_classifier, load_tokenizer
from app.model.tiny import OFFSETS, embeddings_of
from app.settings import Settings

TEXTS = ["房间很干净，服务很好。Room 301 OK", "房间不干净，服务很差。"] * 20


def build(texts=TEXTS, **settings):
    settings = Settings(**settings)
    tokenizer = load_tokenizer(settings, texts)
    embeddings = embeddings_of(settings.model, tokenizer, texts)
    return load_classifier(settings, ["0", "1"], tokenizer, embeddings=embeddings).model.eval(), tokenizer, embeddings


def test_each_attention_head_looks_at_one_of_the_next_tokens():
    model, tokenizer, _ = build()
    ids = torch.tensor([tokenizer(TEXTS[0] * 4)["input_ids"]])
    (weights,) = model(ids, output_attentions=True).attentions  # (rows, heads, tokens, tokens)
    positions = torch.arange(2, ids.shape[1] - 2)
    for head, offset in enumerate(OFFSETS):
        at_offset = weights[0, head, positions, positions + offset]
        assert at_offset.min() > 0.9


def test_embeddings_are_learned_for_tokens_that_occur_and_random_for_others():
    model, tokenizer, learned = build()
    weight = model.get_input_embeddings().weight.detach()
    occurs = torch.from_numpy(learned).any(dim=1)
    assert torch.equal(weight[occurs], torch.from_numpy(learned)[occurs])
    assert not occurs[tokenizer.mask_token_id]
    assert weight[tokenizer.mask_token_id].any()
    other, _, _ = build(seed=1)
    of_other = other.get_input_embeddings().weight.detach()
    assert torch.equal(weight[occurs], of_other[occurs]), "they do not depend on the seed"
    assert not torch.equal(weight[tokenizer.mask_token_id], of_other[tokenizer.mask_token_id])


@pytest.mark.parametrize(
    ("model", "max_length", "epochs", "n_parameters"), [("tiny", 256, 6, 700_000), ("tiny-bert", 128, 3, 1_500_000)]
)
def test_a_built_in_model_has_defaults_of_its_own(model, max_length, epochs, n_parameters, real_csv):
    settings = Settings(model=model)
    assert (settings.max_length, settings.num_train_epochs) == (max_length, epochs)
    assert Settings(model=model, max_length=64).max_length == 64
    built, _, _ = build(read_reviews(real_csv).texts, model=model)
    assert built.num_parameters() == pytest.approx(n_parameters, rel=0.1)


def test_other_models_have_the_defaults_of_fine_tuning():
    settings = Settings(model="bert-base-chinese")
    assert (settings.max_length, settings.num_train_epochs) == (128, 3)


def test_only_tiny_learns_embeddings():
    settings = Settings(model="tiny-bert")
    assert embeddings_of("tiny-bert", load_tokenizer(settings, TEXTS), TEXTS) is None


def test_padding_is_no_problem_in_fp64():
    model, tokenizer, _ = build(precision="fp64")
    batch = tokenizer(["好", TEXTS[0] * 9], padding=True, return_tensors="pt")
    loss = model.train()(**batch, labels=torch.tensor([0, 1])).loss
    loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    with pytest.raises(UserError, match="--attn_implementation eager: ModernBERT cannot train with it in fp64"):
        build(precision="fp64", attn_implementation="eager")
