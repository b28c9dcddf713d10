"""The subjects of fault injection: both training paths, each with tiny models of several architectures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from transformers import BartConfig, GPT2Config, PretrainedConfig

from ..common.paths import PACKAGE
from ..data.csv_table import read_reviews
from ..distributed.launcher import TorchrunJob, torchrun_command
from ..model.tiny_bert import learn_tokenizer
from ..settings import Settings
from .fault_moments import EVAL_STEPS, SAVE_STEPS, STEPS
from .train_pair import PATHS

MODELS = ("bert", "gpt2", "bart")
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
RESTARTS = 3
FLAGS = [
    *("--max_steps", STEPS, "--save_strategy", "steps", "--save_steps", SAVE_STEPS, "--dropout", 0.1),
    *("--eval_strategy", "steps", "--eval_steps", EVAL_STEPS, "--validation_size", 0.1, "--load_best_model_at_end"),
    *("--max_length", 32, "--threads", 1, "--disable_tqdm", "--use_cpu"),
    *("--eval_batch_size", 8),  # small batches make evaluations long enough to kill a rank in them
]


@dataclass(frozen=True)
class Subject:
    """A training path with an architecture, on which jobs are run.

    Attributes:
        flags: those of the training run, without the strategy.
    """

    path_name: str
    model_name: str
    flags: Sequence[str]
    ranks: int
    strategy: str = "ddp"

    def job(self, folder: Path) -> TorchrunJob:
        """Return a job that trains into `folder` and logs to `folder.log`."""
        command = torchrun_command(
            f"{PACKAGE}.{self.path_name}",
            [*self.flags, "--strategy", self.strategy, "--output_dir", folder],
            nproc_per_node=self.ranks,
            torchrun_flags=["--standalone", f"--max-restarts={RESTARTS}"],
        )
        log = folder.with_suffix(".log")
        return TorchrunJob(command, environment={"HF_HUB_OFFLINE": "1"}, stdout=log, grace_seconds=0)


def build_subjects(model_names: Sequence[str], csv: Path | None, ranks: int, *, folder: Path) -> list[Subject]:
    """Return every path with every architecture. The token cache and the models are written into `folder`.

    Raises:
        UserError: a mistake in the CSV.
    """
    csv = csv.resolve() if csv else None
    settings = Settings(csv=str(csv) if csv else None)
    texts = read_reviews(settings.csv_path, settings.text_column, settings.label_column).texts
    models = {name: write_untrained(name, texts, folder / name) for name in dict.fromkeys(model_names)}
    flags = [*map(str, FLAGS), "--cache_dir", str(folder / "cache"), *(["--csv", str(csv)] if csv else [])]
    return [
        Subject(path_name, name, ["--model", models[name], *flags], ranks) for path_name, name in product(PATHS, models)
    ]


def write_untrained(name: str, texts: Any, folder: Path) -> str:
    """Return the value of `--model` for an architecture: `tiny`, or a folder with a tiny config and a tokenizer.

    The folder contains no weights, so they are initialized from the seed.
    """
    if name == "bert":
        return "tiny"
    tokenizer = learn_tokenizer(texts)
    ids: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,  # in every row, where BART's classifier reads its sentence vector
    }
    if name == "gpt2":
        config: PretrainedConfig = GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=2, **ids)
    else:
        layers = {"layers": 1, "attention_heads": 2, "ffn_dim": 64}
        sizes: dict[str, Any] = {f"{part}_{key}": n for part in ("encoder", "decoder") for key, n in layers.items()}
        config = BartConfig(
            d_model=32,
            max_position_embeddings=64,
            decoder_start_token_id=tokenizer.sep_token_id,
            tie_word_embeddings=True,
            **sizes,
            **ids,
        )
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
