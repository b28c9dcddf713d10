"""The models to compare: the settings' own one, or an untrained BERT of a known size as a model folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from transformers import BertConfig, BertTokenizer

from ...flags import SHORT_NAMES, SIZES
from ...settings import Settings

VOCABULARY_SIZE = 21_128  # of BERT for Chinese, most of which does not occur in the reviews
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
UNUSED = "[unused{}]"


def with_model(settings: Settings, name: str, texts: Iterable[str], *, folder: Path) -> Settings:
    """Return the settings with a model: `4x312` and other sizes, or a value of `--model`.

    Args:
        texts: the training rows.
        folder: for the files of a model of a known size.
    """
    if name not in SHORT_NAMES:
        return replace(settings, model=name)
    folder.mkdir(parents=True)
    layers, hidden, heads, intermediate = SIZES[SHORT_NAMES[name]]
    BertConfig(
        vocab_size=VOCABULARY_SIZE,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=intermediate,
        architectures=["BertForSequenceClassification"],
    ).save_pretrained(folder)
    # As in BERT for Chinese, each Chinese character is a token, and the vocabulary has more of them than the reviews.
    characters = sorted({character for text in texts for character in text.lower() if not character.isspace()})
    tokens = [*SPECIAL_TOKENS, *characters, *(f"##{character}" for character in characters if character.isascii())]
    tokens = tokens[:VOCABULARY_SIZE]
    tokens += [UNUSED.format(number) for number in range(VOCABULARY_SIZE - len(tokens))]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return replace(settings, model=str(folder))
