"""`app.diff`: every source is read exactly, and each difference is the one that pandas and numpy find."""

from __future__ import annotations

import json
import math
import sys
from functools import partial
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pandas as pd
import pytest
from helpers.architectures import SMALL
from helpers.run_folders import write_run
from torch.utils.tensorboard import SummaryWriter
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from app.diff import main, read_trace
from app.equality import first_difference_of_traces, ulps
from app.program import run_program


@pytest.fixture
def diff(monkeypatch, capsys):
    """Run the program: `diff(a, b, *flags)` returns its status, and its result or its error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["diff", *map(str, arguments), "--json"])
        capsys.readouterr()
        status = run_program(main)
        out, err = capsys.readouterr()
        return status, json.loads(out) if status < 2 else err

    return run


def write(path: Path, rows: list[dict], **settings) -> Path:
    """Write rows in the format that the name of the file stands for."""
    path.parent.mkdir(exist_ok=True)
    if path.name == "events":
        with SummaryWriter(path) as writer:
            for row in rows:
                for name, value in row.items():
                    writer.add_scalar(name, value, row["step"], new_style=True, double_precision=True)
    elif path.name == "trainer_state.json":
        path.write_text(json.dumps({"log_history": rows, **settings}))
    elif path.suffix == ".csv":
        pd.DataFrame([{name: repr(value) for name, value in row.items()} for row in rows]).to_csv(path, index=False)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", ["log.csv", "trainer_state.json", "events", "log.jsonl"])
def test_the_same_numbers_are_equal_in_every_source_and_the_last_bit_of_one_is_found(tmp_path, diff, kind):
    losses = np.random.default_rng(0).normal(size=20).tolist()
    rows = [{"step": step, "loss": loss, "step_time": loss} for step, loss in enumerate(losses, 1)]
    rows += [{"step": step, "eval/f1": math.nan if step == 5 else -0.0} for step in (5, 10)]
    reference, same = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b" / kind, rows)
    status, result = diff(reference, same)
    assert (status, result["steps_in_common"], result["exact_matches"], result["first_difference"]) == (0, 20, 20, {})
    assert [result["quantities"][name]["common"] for name in ("loss", "eval/f1")] == [20, 2]
    assert "step_time" in result["not_compared"]
    for row, name, value in ((12, "loss", math.nextafter(losses[12], 9)), (20, "eval/f1", 0.5), (21, "eval/f1", 0.0)):
        changed = [*rows[:row], rows[row] | {name: value}, *rows[row + 1 :]]
        status, result = diff(reference, write(tmp_path / f"{row}" / kind, changed))
        assert (status, result["exact_matches"], [*result["first_difference"]]) == (1, 19, [name])
        found = result["first_difference"][name]
        assert (found["step"], repr(float(found["B"]))) == (rows[row]["step"], repr(value))
    assert diff(reference, tmp_path / "12" / kind, "--rtol", 1e-12)[0] == 0


def test_the_largest_difference_is_that_of_pandas_and_its_ulps_those_of_numpy(tmp_path, diff):
    draw = np.random.default_rng(0)
    a = pd.DataFrame({"fp64": draw.normal(size=50), "fp32": draw.normal(size=50).astype(np.float32)}).astype(float)
    b = a * (1 + 1e-6 * draw.normal(size=a.shape))
    b["fp32"] = b["fp32"].astype(np.float32)
    tables = [table.rename_axis("step").reset_index().to_dict("records") for table in (a, b)]
    files = [write(tmp_path / f"{n}.jsonl", rows) for n, rows in enumerate(tables)]
    quantities = diff(*files)[1]["quantities"]
    for name, dtype in (("fp64", np.float64), ("fp32", np.float32)):
        delta = (a[name] - b[name]).abs()
        worst = delta.idxmax()
        assert (quantities[name]["max_difference"], quantities[name]["at_step"]) == (delta.max(), worst)
        expected = np.testing.assert_array_max_ulp(a[name][worst], b[name][worst], math.inf, dtype)
        assert quantities[name]["ULPs"] == expected
        assert quantities[name]["different"] == (a[name] != b[name]).sum()
    for rtol in (1e-7, 1e-6, 2e-6):
        close = sum(np.isclose(b[name], a[name], rtol=rtol, atol=0) for name in a) == 2
        assert diff(*files, "--rtol", rtol)[1]["matches_within_rtol"] == close.sum()
    # From -2 to 2, to a subnormal number of fp32, from a number that fp32 does not have, and from infinity.
    pairs = ((2.0, -2.0), (2.0**-149, 0.0), (0.1, math.nextafter(0.1, 1)), (math.inf, 1.0))
    assert [ulps(*pair) for pair in pairs] == [2**31, 1, 1, None]


def test_runs_of_this_program_are_compared_with_their_settings_and_traces(tmp_path, review_csv, diff):
    a, b = tmp_path / "a", tmp_path / "b"
    for folder, settings in ((a, {}), (b, {"path": "trainer_run", "learning_rate": 0.1, "date": "now"})):
        write_run(folder, review_csv(), **settings)
    status, result = diff(a, b)
    assert (status, result["exact_matches"], result["not_compared"]) == (0, 12, ["seconds"])
    settings = {"learning_rate": {"A": 0.001, "B": 0.1}, "path": {"A": "ddp_loop", "B": "trainer_run"}}
    assert result["settings_that_differ"] == settings
    assert result["quantities"]["eval_f1"]["common"] == 1
    first = {"step": 10, "logical_rank": 0, "micro_batch": 0, "phase": "forward", "name": "layer"}
    first |= {"hash": "0", "norm": 1}
    names = ("embeddings", "layer", "layer", "head")  # one module is called twice
    at = [(step, rank) for step in (10, 11) for rank in (0, 1)]
    trace = [first | {"step": step, "logical_rank": rank, "name": name} for step, rank in at for name in names]
    trace += [first | {"step": 11, "logical_rank": None, "micro_batch": None, "phase": "summed gradient"}]
    write(a / "tensors.jsonl", trace)
    write(b / "tensors.jsonl", trace[8:])
    assert diff(a, b)[1]["trace"] == "equal"
    assert first_difference_of_traces(read_trace(a / "tensors.jsonl"), read_trace(b / "tensors.jsonl")) == (9, None)
    of_sum = "step 11: `layer` differs first among the summed gradients (norms differ by 2 ULP); the 0 summed"
    where = "step 11, logical rank 1, micro-batch 0: `layer` differs first in the forward pass"
    of_call = f"{where} (norms differ by 2 ULP); the 2 outputs before it are equal"
    for place, line in ((16, of_sum), (14, of_call)):  # of_call: in the second call of the module
        trace[place] |= {"hash": "1", "norm": 1 + 2 * 2**-23}
        write(b / "tensors.jsonl", trace[8:])
        status, result = diff(a, b)
        assert (status, result["exact_matches"]) == (1, 12)
        assert result["trace"].startswith(line)
    status, result = diff(a / "tensors.jsonl", b / "tensors.jsonl")  # as of FixedTree.trace_tensors
    assert (status, result["trace"].startswith(of_call)) == (1, True)
    assert diff(a / "tensors.jsonl", write(b / "x.jsonl", [{"step": 1, "loss": 1}]))[0] == 2


def test_traces_of_other_lengths_and_tensors_are_not_equal(tmp_path, diff):
    """Whatever the names of the files, and in a folder with or without a log of Trainer."""
    line = {"step": 1, "logical_rank": 0, "micro_batch": 0, "phase": "forward", "name": "a", "hash": "0", "norm": 1}
    lines = [line | {"step": step, "name": name} for step in (1, 2) for name in "ab"]
    a, short, less = (tmp_path / name for name in ("a.jsonl", "short.txt", "less"))
    write(a, lines)
    write(short, lines[:2])
    write(less / "tensors.jsonl", lines[:3])
    assert diff(a, a)[0] == 0
    assert diff(a, short) == (1, {"traced_tensors_in_common": 2, "trace": ANY, "equal": False})
    assert diff(a, short)[1]["trace"] == "equal up to step 1; the last steps are 2 and 1"
    for folder in (a, write(tmp_path / "run" / "tensors.jsonl", lines).parent):
        assert diff(folder, less)[1]["trace"] == "step 2: `b` is in one of the traces only"
        write(tmp_path / "run" / "trainer_state.json", [{"step": 1, "loss": 1}])
        write(less / "trainer_state.json", [{"step": 1, "loss": 1}])
    assert diff(write(tmp_path / "late.jsonl", lines[2:]), short)[1]["trace"] == "no step is traced in both"


def test_the_log_of_trainer_is_compared_up_to_the_step_after_which_the_learning_rate_matters(tmp_path, diff):
    rows = [{"input_ids": [i, i + 1], "labels": i % 2} for i in range(8)]
    new_model = partial(BertForSequenceClassification, BertConfig(**SMALL))
    schedule = {"max_steps": 4, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no"}
    for name, rate in (("a", 0.1), ("b", 0.1), ("c", 0.2)):
        options = {"learning_rate": rate, "lr_scheduler_type": "constant", "report_to": "none", "use_cpu": True}
        arguments = TrainingArguments(str(tmp_path / name), disable_tqdm=True, **schedule, **options)
        trainer = Trainer(args=arguments, model_init=new_model, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        trainer.save_state()
    status, result = diff(tmp_path / "a", tmp_path / "b" / "trainer_state.json")
    assert (status, result["exact_matches"], result["quantities"]["eval_loss"]["common"]) == (0, 4, 2)
    assert {"train_runtime", "eval_samples_per_second"} <= {*result["not_compared"]}
    status, result = diff(tmp_path / "a", tmp_path / "c", "--rtol", 1e-6)
    assert (status, result["matches_within_rtol"]) == (1, 0)
    found = result["first_difference"], result["quantities"]["loss"]["different"]
    assert found == ({"learning_rate": {"step": 1, "A": 0.1, "B": 0.2}}, 3), "the first loss is that of equal weights"


def test_what_only_one_has_is_counted_and_a_run_that_ends_earlier_is_different(tmp_path, diff, capsys):
    rows = [{"step": step, "loss": 1 / step} for step in range(1, 11)]
    rows += [{"step": step, "eval_loss": 1 / step} for step in (5, 10)]
    log = write(tmp_path / "a.jsonl", [{"lr": 1}, *rows])
    other = [{"lr": 2}, *rows[::2], {"step": 10, "loss": 9.0}, {"step": 10, "loss": 0.1, "norm": 1}]  # the last counts
    status, result = diff(log, write(tmp_path / "b.jsonl", other))
    assert (status, result["steps_in_common"], result["settings_that_differ"]) == (0, 6, {"lr": {"A": 1, "B": 2}})
    counts = {name: [*of_one.values()][:4] for name, of_one in result["quantities"].items()}
    assert counts == {"loss": [10, 6, 6, 0], "eval_loss": [2, 1, 1, 0], "norm": [0, 1, 0, 0]}
    status, result = diff(log, write(tmp_path / "c.jsonl", rows[:9]))
    assert (status, result["exact_matches"], result["last_step_of_B"], result["equal"]) == (1, 9, 9, False)


@pytest.mark.parametrize(
    ("file", "content", "line"),
    [
        ("a.jsonl", None, "No such file"),
        ("a.jsonl", '{"step": 1, "loss": 1}\n{"step": 2, "lo', "line 2: must be a JSON object"),
        ("a.jsonl", '{"step": 1, "loss": 1}\n{"loss": 2}\n', "row 2: must have a whole number `step`"),
        ("a.csv", "step,loss\n1,2\n1.5,2\n", "row 2: must have a whole number `step`"),
        ("a.csv", "step,loss\n1,2\n2,2,3\n", "ParserError"),
        ("a.csv", "step,loss\n1,2\n2,broken\n", "'loss' is not always a number, as it is in"),
        ("a.jsonl", '{"step": 1, "time": 1}\n', "no row has a number besides `step`"),
        ("a.jsonl", '{"step": 9, "loss": 1}\n', "have no quantity in common at the same step"),
        ("trainer_state.json", "{}", "log_history"),
        ("events.tfevents", "", "pip install tensorboard"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_file(tmp_path, diff, monkeypatch, file, content, line):
    # As if it were not installed.
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.plugin_event_accumulator", None)
    log = write(tmp_path / "log.jsonl", [{"step": 1, "loss": 0.5}])
    if content is not None:
        (tmp_path / file).write_text(content)
    status, error = diff(tmp_path / file, log)
    assert (status, error.count("\n")) == (2, 1)
    assert error.startswith(f"error: {tmp_path / file}")
    assert line in error
