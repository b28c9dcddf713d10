"""The models to compare, as model folders that the training paths load like any other."""

from __future__ import annotations

from app.bench.speed.models import VOCABULARY_SIZE, with_model
from app.model.load import load_classifier, load_tokenizer
from app.settings import Settings

TEXTS = ["房间很好, OK", "早餐 很差"]


def test_a_size_is_an_untrained_bert_with_the_characters_of_the_reviews(tmp_path):
    settings = with_model(Settings(), "4x312", TEXTS, folder=tmp_path / "model")
    tokenizer = load_tokenizer(settings, [])
    assert tokenizer.tokenize("早餐很好ok吗") == ["早", "餐", "很", "好", "o", "##k", "[UNK]"]
    assert len(tokenizer) == VOCABULARY_SIZE
    classifier = load_classifier(settings, ["0", "1"], tokenizer)
    config = classifier.model.config
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (4, 312, VOCABULARY_SIZE)
    assert not classifier.pretrained


def test_any_other_name_is_that_of_a_model(tmp_path):
    assert with_model(Settings(), "bert-base-chinese", TEXTS, folder=tmp_path / "model").model == "bert-base-chinese"
    assert not (tmp_path / "model").exists()
