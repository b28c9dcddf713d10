"""Tiny models of many architectures, and a program that runs many trainings in one torchrun job to save start-up time.

As a script it reads RUNS, a JSON file with a list of [training path, flags], and writes outcomes.json beside it: for
each run what it raised, what it changed in the model's config, and how DDP was set up.
"""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
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
    set_seed,
)

import app.ddp_loop
import app.runs.resume
import app.trainer_run
import app.training.build
from app.cli import launch, parse_settings
from app.distributed.process_group import join
from app.model.tiny_bert import learn_tokenizer
from app.runs.record import RunRecord
from app.settings import Settings

PATHS = {"ddp_loop": app.ddp_loop, "trainer_run": app.trainer_run}


class BatchNormBertConfig(BertConfig):
    model_type = "batch-norm-bert"


class BatchNormBert(BertForSequenceClassification):
    """A classifier whose buffers change in training: each rank's running statistics are those of its own rows."""

    config_class = BatchNormBertConfig

    def __init__(self, config: BatchNormBertConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.classifier = torch.nn.Sequential(torch.nn.BatchNorm1d(width), torch.nn.Linear(width, config.num_labels))


AutoConfig.register(BatchNormBertConfig.model_type, BatchNormBertConfig)
AutoModelForSequenceClassification.register(BatchNormBertConfig, BatchNormBert)

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
PAIR = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
# Where a config has special tokens, they are not the tokenizer's ([PAD] 0, [CLS] 2, [SEP] 3): the tokenizer's hold.
CONFIGS: dict[str, PreTrainedConfig] = {
    "bert": BertConfig(**SMALL),
    "roberta": RobertaConfig(**SMALL, max_position_embeddings=66),
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
    """A folder with the config of an architecture and a tokenizer, but no weights."""
    tokenizer = learn_tokenizer(["好，差。第一次 0123456789"] * 20)
    tokenizer.bos_token, tokenizer.eos_token = "[CLS]", "[SEP]"
    for attribute, value in tokenizer_changes.items():
        setattr(tokenizer, attribute, value)
    config = CONFIGS[name].__class__(**(CONFIGS[name].to_diff_dict() | {"vocab_size": len(tokenizer)}))
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    return folder


def write_hub_cache(cache: Path, name: str, **commits: str) -> None:
    """A local cache of the Hub with commits of a model, by the names of their branches.

    Args:
        commits: hashes by branch. Each commit has other weights.
    """
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    for seed, (branch, commit) in enumerate(commits.items()):
        (repository / "refs" / branch).write_text(commit)
        snapshot = write_model(repository / "snapshots" / commit, "bert")
        set_seed(seed)
        AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(snapshot)).save_pretrained(snapshot)


# ---- the script -----------------------------------------------------------------------------------------------------


class Watch:
    """What the run that is going on has loaded and wrapped."""

    def __init__(self) -> None:
        self.ddp: dict[str, Any] = {}
        self.loaded: list[Any] = []
        self.changes: list[tuple[str, str]] = []
        load, wrap, finish = app.training.build.load_classifier, DistributedDataParallel.__init__, RunRecord.finish

        def load_and_watch(*arguments: Any) -> Any:
            classifier = load(*arguments)
            model, tokenizer = classifier.model, arguments[2]
            self.loaded = [model, tokenizer, *self.describe(model, tokenizer)]
            return classifier

        def wrap_and_watch(ddp: DistributedDataParallel, *arguments: Any, **options: Any) -> None:
            wrap(ddp, *arguments, **options)
            plain = {name: x for name, x in vars(ddp).items() if isinstance(x, bool | int | float | str | None)}
            self.ddp |= plain | {"broadcast_buffers": ddp.broadcast_buffers}

        def look_and_finish(record: RunRecord, *arguments: Any) -> None:
            model, tokenizer, *before = self.loaded
            after = self.describe(model, tokenizer)
            self.changes += [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
            finish(record, *arguments)

        RunRecord.finish = look_and_finish  # type: ignore[method-assign]
        app.training.build.load_classifier = load_and_watch
        DistributedDataParallel.__init__ = wrap_and_watch  # type: ignore[method-assign]

    @staticmethod
    def describe(model: Any, tokenizer: Any) -> list[str]:
        """Everything but what saving a model adds to its config."""
        generation_config = getattr(model, "generation_config", None)
        config = {name: x for name, x in model.config.to_dict().items() if name not in ("architectures", "dtype")}
        return [repr(config), repr(generation_config), repr(tokenizer), repr(tokenizer.init_kwargs)]


def run_all(settings: Settings) -> None:
    file = Path(os.environ["RUNS"])
    outcomes = []
    watch = Watch()
    with join(settings) as world:
        for path, flags in json.loads(file.read_text()):
            watch.ddp, watch.changes, problem = {}, [], None
            try:
                PATHS[path].fine_tune(parse_settings(arguments=flags), world)  # type: ignore[attr-defined]
            except Exception as raised:
                problem = f"{type(raised).__name__}: {raised}"
            outcomes.append({"problem": problem, "changes": watch.changes, "ddp": watch.ddp})
            gc.collect()  # a DDP module must not outlive the process group
    if world.is_main_process:
        file.with_name("outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    launch(run_all, None)
