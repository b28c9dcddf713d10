"""Untrained BERTs of known sizes, as model folders that every program can train."""

from __future__ import annotations

from pathlib import Path

from transformers import BertTokenizer

from .flags import SHORT_NAMES, SIZES
from .steps import bert_config

VOCABULARY_SIZE = 21_128  # as BERT for Chinese has, in which each Chinese character is a token
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CHINESE = "".join(map(chr, range(0x4E00, 0x9FA6)))
ASCII = "".join(map(chr, range(0x21, 0x7F)))
PUNCTUATION = "，。！？、；：“”（）…《》—·～"


def model_folder(name: str, folder: Path) -> str:
    """Write a BERT of `SIZES`, such as `4x312`, into a folder; return the value of `--model` for it.

    Other names are returned as they are.
    """
    name = SHORT_NAMES.get(name, name)
    if name not in SIZES:
        return name
    folder.mkdir(parents=True)
    config = bert_config(name)
    config.vocab_size, config.architectures = VOCABULARY_SIZE, ["BertForSequenceClassification"]
    config.save_pretrained(folder)
    tokens = [*SPECIAL_TOKENS, *ASCII.lower(), *(f"##{character}" for character in ASCII), *PUNCTUATION, *CHINESE]
    tokens = list(dict.fromkeys(tokens))
    tokens += [f"[unused{number}]" for number in range(VOCABULARY_SIZE - len(tokens))]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return str(folder)
