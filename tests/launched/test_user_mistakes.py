"""Each mistake of a user is one line that names the flag or file, with status 2, and leaves nothing half-written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers.architectures import write_model
from helpers.jobs import Job, write_reviews

pytestmark = pytest.mark.launched
BRIEF = ["--csv=reviews.csv", "--max_length=16", "--max_steps=1", "--eval_strategy=no", "--save_strategy=no"]
BRIEF += ["--use_cpu", "--threads=1", "--disable_tqdm", "--cache_dir=cache"]
RUN = ["run", "--use_cpu", "--threads=1", "--disable_tqdm", "--cache_dir=cache"]
# The command line after BRIEF (of app.ddp_loop) or RUN (of app.predict), and what its one line names.
OF_TRAINING = {
    # flags
    "--lerning_rate=1": "did you mean --learning_rate",
    "--learning_rate=fast": "--learning_rate fast",
    "--learning_rate=0": "--learning_rate 0",
    "--train_batch_size=0": "--train_batch_size 0",
    "--train_batch_size=4096": "--train_batch_size",
    "--logical_ranks=3 --train_batch_size=32": "--logical_ranks",
    "--gradient_accumulation_steps=5": "--gradient_accumulation_steps",
    "--max_steps=0": "--max_steps 0",
    "--strategy=zero4": "--strategy zero4",
    "--precision=fp8": "--precision fp8",
    "--cpu_offload": "--cpu_offload",
    "--ddp_comm_hook=bf16 --strategy=zero3": "--ddp_comm_hook bf16",
    "--bf16 --precision=fp16": "--bf16",
    "--load_best_model_at_end": "--load_best_model_at_end",
    "--class_weights=1,2,3": "--class_weights",
    "--label_names=7=bad": "--label_names",
    "--validation_file=reviews.csv --validation_size=0.1": "--validation_file",
    "--report_to=excel": "--report_to excel",
    "--train_batch_size=8 --per_device_train_batch_size=4": "--train_batch_size and --per_device_train_batch_size",
    "--config=value.yaml": "--precision fp8",
    "--config=missing.yaml": "--config missing.yaml",
    "--config=list.yaml": "--config list.yaml",
    "--csv": "--csv",
    "nope": "nope",
    # data
    "--csv=missing.csv": "missing.csv: no such file",
    "--csv=.": ".",
    "--csv=empty.csv": "empty.csv",
    "--csv=one_class.csv": "one_class.csv",
    "--csv=three_rows.csv": "three_rows.csv",
    "--csv=too_many_fields.csv": "too_many_fields.csv",
    "--csv=binary.csv": "binary.csv",
    "--csv=broken.jsonl": "broken.jsonl",
    "--csv=broken.parquet": "broken.parquet",
    "--csv=reviews.xlsx": "reviews.xlsx",
    "--text_column=text": "text",
    "--label_column=class": "class",
    "--label_column=review": "--label_column review",
    "--test_file=other_classes.csv": "other_classes.csv",
    # models
    "--model=no_such_folder/model": "no_such_folder/model",
    "--model=empty": "empty",
    "--model=without_tokenizer": "without_tokenizer",
    "--model=damaged": "damaged",
    "--model=bert --max_length=4096": "--max_length 4096",
    # folders
    "--output_dir=full": "--output_dir full",
    "--output_dir=reviews.csv": "--output_dir reviews.csv",
    "--output_dir=reviews.csv/run": "--output_dir reviews.csv/run",
    "--resume_from_checkpoint=missing": "missing",
    "--resume_from_checkpoint=full": "full",
}
OF_PREDICT = {
    "--csv=missing.csv": "missing.csv",
    "--csv=one_class.csv --text_column=text": "text",
    "--split=test --output=reviews.csv": "--output reviews.csv",
    "--split=validation": "--split validation",
    "--csv=reviews.csv 好": "--csv",
    "": "nothing to predict",
}
OTHERS = {
    "predict missing --csv=reviews.csv": "missing",
    "compare run": "name two",
    "compare run missing": "missing",
    "compare run full": "full",
    "compare run run --learning_rate=1e-4": "--learning_rate",
    "compare run run --seeds=2": "--seeds",
    "compare --dry_run": "--dry_run",
    "compare --csv=reviews.csv --nproc_per_node=0": "--nproc_per_node 0",
    "compare --ablate run run": "--ablate",
    "compare --ablate --assert_equal": "--ablate",
    "compare --ablate --seeds=0": "--seeds",
    "compare --ablate --csv=reviews.csv --train_batch_size=33": "--train_batch_size 33",
    "compare --ablate --csv=reviews.csv --ddp_comm_hook=bf16": "hooks",
    "check --lerning_rate=1": "did you mean --learning_rate",
    "plan --lerning_rate=1": "did you mean --learning_rate",
}
COMMANDS = [
    *((f"ddp_loop {flags}", ["ddp_loop", *BRIEF, *flags.split()], line) for flags, line in OF_TRAINING.items()),
    *((f"predict run {flags}", ["predict", *RUN, *flags.split()], line) for flags, line in OF_PREDICT.items()),
    *((flags, flags.split(), line) for flags, line in OTHERS.items()),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, and with files and models that have something wrong with them."""
    folder = tmp_path_factory.mktemp("mistakes")
    write_reviews(folder / "reviews.csv", 90)
    write_reviews(folder / "three_rows.csv", 3)
    write_reviews(folder / "other_classes.csv", 30, classes=(7, 8))
    pd.DataFrame({"label": [1] * 40, "review": ["好"] * 40}).to_csv(folder / "one_class.csv", index=False)
    texts = {"empty.csv": "", "broken.jsonl": '{"label": 0, "review": "a"}\n{"label": ', "list.yaml": "- 1"}
    texts["value.yaml"] = "precision: fp8"
    texts |= {"too_many_fields.csv": "label,review\n" + "0,a\n1,b\n" * 20 + "0,a,b\n", "broken.parquet": "PAR1"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    for name in ("binary.csv", "reviews.xlsx"):
        (folder / name).write_bytes(bytes(range(256)) * 9)
    for name in ("bert", "without_tokenizer", "damaged"):
        write_model(folder / name, "bert")
    for file in (folder / "without_tokenizer").glob("*token*"):
        file.unlink()
    (folder / "damaged" / "config.json").write_text("{")
    for name in ("empty", "full"):
        (folder / name).mkdir()
    (folder / "full" / "notes.txt").touch()
    with Job("ddp_loop", *BRIEF, "--output_dir=run", cwd=folder, ranks=0) as job:
        assert job.finish().status == 0, job.text
    return folder


def content(folder: Path) -> dict[str, Any]:
    """The names of all files and folders, except for the cache."""
    names = {str(path.relative_to(folder)): path.is_dir() for path in folder.rglob("*")}
    return {name: kind for name, kind in names.items() if name.split(os.sep)[0] != "cache"}


@pytest.mark.parametrize(("arguments", "line"), [pytest.param(a, line, id=name) for name, a, line in COMMANDS])
def test_a_mistake_is_one_line(folder, arguments, line):
    before = content(folder)
    with Job(*arguments, cwd=folder, ranks=0) as job:
        done = job.finish(120)
    assert done.status == 2, done.out + done.err
    lines = [text for text in done.err.splitlines() if not text.startswith("warning: ")]
    assert len(lines) == 1, done.err
    assert lines[0].startswith("error: ")
    assert line in lines[0]
    assert content(folder) == before
