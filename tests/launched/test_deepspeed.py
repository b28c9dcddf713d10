"""app.deepspeed_run: the files of tutorials train as app.ddp_loop does, within rounding, and a mistake is one line."""

from __future__ import annotations

import importlib.util
import json

import pandas as pd
import pytest
from helpers.jobs import SAMPLE_CSV, unavailable

from app.report.explanation import explain
from app.runs.reader import read_run

pytestmark = [pytest.mark.launched, pytest.mark.slow]

AUTO = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
AUTO["gradient_clipping"] = "auto"
# The usual file of tutorials: the optimizer is DeepSpeed's own, which is compiled at its first use.
TUTORIAL = AUTO | {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        **{"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto"},
        **{"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
    },
}
CONFIGS = {f"stage-{stage}": AUTO | {"zero_optimization": {"stage": stage}} for stage in (1, 2, 3)}
CONFIGS["tutorial"] = TUTORIAL
FLAGS = ["--csv", SAMPLE_CSV, "--model=tiny-bert", "--max_steps=6", "--max_length=32", "--dropout=0.1"]
FLAGS += ["--gradient_accumulation_steps=2", "--use_cpu", "--threads=1", "--disable_tqdm"]


@pytest.fixture(autouse=True)
def require_deepspeed() -> None:
    if importlib.util.find_spec("deepspeed") is None:
        unavailable("DeepSpeed is not installed: run bash run_scripts/setup.sh --deepspeed")


def test_every_stage_trains_like_ddp_within_rounding(launch, tmp_path):
    reference = ["--output_dir=reference", "--save_strategy=no", "--eval_strategy=no"]
    done = launch("ddp_loop", *FLAGS, *reference, ranks=2)
    assert done.status == 0, done.err
    expected = pd.read_json(tmp_path / "reference" / "steps.jsonl", lines=True)
    for name, config in CONFIGS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        done = launch("deepspeed_run", *FLAGS, f"--deepspeed={name}.json", f"--output_dir={name}", ranks=2)
        assert done.status == 0, done.err
        steps = pd.read_json(tmp_path / name / "steps.jsonl", lines=True)
        for column in ("loss", "grad_norm", "learning_rate"):
            assert steps[column].to_numpy() == pytest.approx(expected[column].to_numpy(), rel=1e-3), (name, column)
        a, b = read_run(tmp_path / name), read_run(tmp_path / "reference")
        assert a.settings["wrapper"] == "DeepSpeedEngine"
        columns = ["row", "probability_1"]
        assert a.predictions[columns].to_numpy() == pytest.approx(b.predictions[columns].to_numpy(), abs=1e-3)
        assert "DeepSpeed adds gradients in an order of its own" in explain(a, b, "step 1: the loss")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "--deepspeed ds.json: "),
        (json.dumps(AUTO | {"zero_optimization": {"stage": 2}, "train_batch_size": 64}), "DeepSpeed: Please correct"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(launch, tmp_path, content, message):
    (tmp_path / "ds.json").write_text(content)
    done = launch("deepspeed_run", *FLAGS, "--deepspeed=ds.json", "--output_dir=run")
    assert done.status == (2 if message.startswith("--") else 1)
    (line,) = done.error_lines
    assert line.startswith(f"error: {message}")
    assert not (tmp_path / "run" / "metrics.json").exists()
