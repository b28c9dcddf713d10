"""Each mistake of a user is one line that names the flag or file, with status 2, and leaves nothing half-written.

What the tests of settings, data, models, folders and help check in one process is not repeated here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.architectures import write_model
from helpers.jobs import Job, write_reviews

pytestmark = pytest.mark.launched
BRIEF = ["--csv=reviews.csv", "--max_length=16", "--max_steps=1", "--eval_strategy=no", "--save_strategy=no"]
CPU = ["--use_cpu", "--threads=1", "--disable_tqdm", "--cache_dir=../cache"]
# The command line after BRIEF (of app.ddp_loop) or `run` (of app.predict), and what its one line names.
OF_TRAINING = {
    # flags
    "--bf16 --precision=fp16": "--bf16",
    "--load_best_model_at_end": "--load_best_model_at_end",
    "--class_weights=1,2,3": "--class_weights",
    "--report_to=excel": "--report_to excel",
    "--trace_tensors=2:3": "--trace_tensors 2:3: the run ends after step 1",
    "--train_batch_size=8 --per_device_train_batch_size=4": "--train_batch_size and --per_device_train_batch_size",
    "--config=list.yaml": "--config list.yaml",
    "--csv": "--csv",
    "nope": "nope",
    # data
    "--csv=.": ".",
    "--csv=empty.csv": "empty.csv",
    "--csv=three_rows.csv": "three_rows.csv",
    "--csv=binary.csv": "binary.csv",
    "--csv=broken.jsonl": "broken.jsonl",
    "--csv=broken.parquet": "broken.parquet",
    "--csv=reviews.xlsx": "reviews.xlsx",
    "--text_column=text": "text",
    "--label_column=review": "--label_column review",
    # models and folders
    "--model=no_such_folder/model": "no_such_folder/model",
    "--model=empty": "empty",
    "--model=without_tokenizer": "without_tokenizer",
    "--resume_from_checkpoint=missing": "missing",
    "--resume_from_checkpoint=full": "full",
}
OF_PREDICT = {
    "--csv=missing.csv": "missing.csv",
    "--split=validation": "--split validation",
    "--csv=reviews.csv 好": "--csv",
    "": "nothing to predict",
}
OTHERS = {
    "predict without_tokenizer 好": "without_tokenizer: has no files of a tokenizer",
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
}
COMMANDS = [
    *((f"ddp_loop {flags}", ["ddp_loop", *BRIEF, *CPU, *flags.split()], line) for flags, line in OF_TRAINING.items()),
    *((f"predict run {flags}", ["predict", "run", *CPU, *flags.split()], line) for flags, line in OF_PREDICT.items()),
    *((flags, flags.split(), line) for flags, line in OTHERS.items()),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, and with files and models that have something wrong with them."""
    folder = tmp_path_factory.mktemp("mistakes") / "user"
    folder.mkdir()
    write_reviews(folder / "reviews.csv", 90)
    write_reviews(folder / "three_rows.csv", 3)
    texts = {"empty.csv": "", "broken.jsonl": '{"label": 0, "review": "a"}\n{"label": ', "list.yaml": "- 1"}
    texts["broken.parquet"] = "PAR1"
    for name, text in texts.items():
        (folder / name).write_text(text)
    for name in ("binary.csv", "reviews.xlsx"):
        (folder / name).write_bytes(bytes(range(256)) * 9)
    for file in write_model(folder / "without_tokenizer", "bert").glob("*token*"):
        file.unlink()
    for name in ("empty", "full"):
        (folder / name).mkdir()
    (folder / "full" / "notes.txt").touch()
    with Job("ddp_loop", *BRIEF, *CPU, "--output_dir=run", cwd=folder, ranks=0) as job:
        assert job.finish().status == 0, job.text
    return folder


@pytest.mark.parametrize(("arguments", "line"), [pytest.param(a, line, id=name) for name, a, line in COMMANDS])
def test_a_mistake_is_one_line(folder, arguments, line):
    before = {*folder.rglob("*")}
    with Job(*arguments, cwd=folder, ranks=0) as job:
        done = job.finish(120)
    assert done.status == 2, done.out + done.err
    lines = [text for text in done.err.splitlines() if not text.startswith("warning: ")]
    assert len(lines) == 1, done.err
    assert lines[0].startswith("error: ")
    assert line in lines[0]
    assert {*folder.rglob("*")} == before


def test_tasks_of_srun_without_torchrun_get_a_hint(tmp_path):
    slurm = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "0"}
    with Job("predict", "tiny", "好", cwd=tmp_path, ranks=0, **slurm) as job:
        printed = job.finish(120).err
    assert printed.startswith("warning: srun has started 3 tasks, but without torchrun each trains for itself")
