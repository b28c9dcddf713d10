"""The flags of app.predict. They are here, without torch, so that a mistake in them is reported at once."""

from __future__ import annotations

from .cli import OneLineParser

# The settings that affect predictions.
USED = (
    *("csv", "validation_file", "test_file", "dataset_name", "text_column", "label_column", "label_names"),
    *("max_length", "pad_to_multiple_of", "cache_dir"),
    *("revision", "attn_implementation", "trust_remote_code", "precision", "tf32", "deterministic"),
    *("eval_batch_size", "use_cpu", "threads", "ddp_timeout", "disable_tqdm"),
)


def add_arguments(parser: OneLineParser) -> None:
    parser.add_argument(
        "run_or_model", metavar="RUN_OR_MODEL", help="folder of a run, model folder, or model on the Hub"
    )
    parser.add_argument("texts", nargs="*", default=[], metavar="TEXT", help="texts to predict instead of a CSV")
    parser.add_argument("--split", choices=("train", "validation", "test"), help="predict these rows of the run's data")
    parser.add_argument(
        "--output",
        metavar="FILE.csv",
        help="a new file; default: <CSV>-predictions.csv in the current folder, with --split <split>-predictions.csv",
    )
