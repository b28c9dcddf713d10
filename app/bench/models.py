"""Untrained BERTs of known sizes, as model folders: every benchmark takes their names as `--model`, such as `4x312`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from ..cli import OneLineParser
from ..common.files import cached_file
from ..setting_groups import TINY_BERT
from ..settings import Settings

# Layers, hidden size, attention heads, intermediate size.
SIZES = {"4x312": (4, 312, 12, 1200), "4x512": (4, 512, 8, 2048), "12x768": (12, 768, 12, 3072)}
VOCABULARY_SIZE = 21_128  # as BERT for Chinese has, in which each Chinese character is a token
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CHINESE = "".join(map(chr, range(0x4E00, 0x9FA6)))
ASCII = "".join(map(chr, range(0x21, 0x7F)))
PUNCTUATION = "，。！？、；：“”（）…《》—·～"


def measure_tiny_bert(parser: OneLineParser) -> None:
    """Make `tiny-bert` the default model: a benchmark is of more use with the architecture that most users train."""
    parser.set_defaults(model=TINY_BERT)


def with_model_folder(settings: Settings) -> Settings:
    """Return the settings with a model folder, in the cache, if their model is one of `SIZES`."""
    if settings.model not in SIZES:
        return settings
    folder = Path(settings.cache_dir, f"bert-{settings.model}")
    cached_file(folder, partial(write_bert, settings.model))
    return replace(settings, model=str(folder))


def write_bert(size: str, folder: Path) -> None:
    """Write the config and the tokenizer of a BERT. It has no weights, so the seed initializes them."""
    from transformers import BertConfig, BertTokenizer  # here, because flags are parsed before it is imported

    layers, hidden, heads, intermediate = SIZES[size]
    BertConfig(
        vocab_size=VOCABULARY_SIZE,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=intermediate,
        architectures=["BertForSequenceClassification"],
    ).save_pretrained(folder)
    tokens = dict.fromkeys([*SPECIAL_TOKENS, *ASCII.lower(), *(f"##{c}" for c in ASCII), *PUNCTUATION, *CHINESE])
    unused = [f"[unused{number}]" for number in range(VOCABULARY_SIZE - len(tokens))]
    (folder / "vocab.txt").write_text("\n".join([*tokens, *unused]) + "\n", encoding="utf-8")
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
