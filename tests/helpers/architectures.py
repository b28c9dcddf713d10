"""Tiny models of many architectures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BartConfig,
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    ElectraConfig,
    FNetConfig,
    GPT2Config,
    ModernBertConfig,
    PreTrainedConfig,
    Qwen2Config,
    RobertaConfig,
    T5Config,
    XLNetConfig,
)

from app.model.built_in import learn_tokenizer


class BatchNormBertConfig(BertConfig):
    model_type = "batch-norm-bert"


class BatchNormBert(BertForSequenceClassification):
    """A classifier with buffers that training changes: each rank has the running statistics of its own rows."""

    config_class = BatchNormBertConfig

    def __init__(self, config: BatchNormBertConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.classifier = torch.nn.Sequential(torch.nn.BatchNorm1d(width), torch.nn.Linear(width, config.num_labels))


AutoConfig.register(BatchNormBertConfig.model_type, BatchNormBertConfig)
AutoModelForSequenceClassification.register(BatchNormBertConfig, BatchNormBert)

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
PAIR = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
# Special tokens in a config differ from the tokenizer's ([PAD] 0, [CLS] 2, [SEP] 3), which take precedence.
CONFIGS: dict[str, PreTrainedConfig] = {
    "bert": BertConfig(**SMALL),
    "roberta": RobertaConfig(**SMALL, max_position_embeddings=66, pad_token_id=0),
    "distilbert": DistilBertConfig(dim=32, n_layers=2, n_heads=2, hidden_dim=32),
    "electra": ElectraConfig(**SMALL, embedding_size=32),
    "modernbert": ModernBertConfig(**SMALL, pad_token_id=5, cls_token_id=2, sep_token_id=3),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, pad_token_id=5),
    "qwen2": Qwen2Config(**SMALL, num_key_value_heads=1),
    "bart": BartConfig(d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, **PAIR, max_position_embeddings=64),
    "t5": T5Config(d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0),
    "fnet": FNetConfig(hidden_size=32, num_hidden_layers=2, intermediate_size=32, max_position_embeddings=64),
    "batch_norm": BatchNormBertConfig(**SMALL),
    "xlnet": XLNetConfig(d_model=32, n_layer=2, n_head=2, d_inner=32),
}


def write_model(folder: Path, name: str, **tokenizer_changes: Any) -> Path:
    """Write a folder with the config of an architecture and a tokenizer, but no weights."""
    tokenizer = learn_tokenizer(["好，差。第一次 0123456789"] * 20, 8_000)
    tokenizer.bos_token, tokenizer.eos_token = "[CLS]", "[SEP]"
    for attribute, value in tokenizer_changes.items():
        setattr(tokenizer, attribute, value)
    size = 2 * len(tokenizer)  # so that training trims the vocabulary
    config = CONFIGS[name].__class__(**(CONFIGS[name].to_diff_dict() | {"vocab_size": size}))
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    return folder
