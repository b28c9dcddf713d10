"""Compare two trainings step by step: the settings that differ, and the first step and quantity that do.

    python -m app.diff runs/ddp_loop/latest runs/trainer_run/latest
    python -m app.diff before/trainer_state.json after.jsonl --rtol 1e-6

A and B are run folders of this program, JSON Lines or CSV files with a number `step` in each row (a first JSON line
without it holds settings), `trainer_state.json` of Trainer or TRL, TensorBoard's event files, or folders of these.
What both have is compared; times, memory and texts are left out. Numbers are equal if all their bits are, or if both
are NaN. ULPs are the fp32 numbers from one fp32 number to another, or else the fp64 numbers. Of two runs with
--trace_tensors, or two traces of FixedTree, the first tensor that differs is named. Exit statuses: 0 equal, and both
end at the same step; 1 different; 2 a mistake, such as a file that cannot be read.
"""

from __future__ import annotations

from .cli import OneLineParser, positive
from .program import Program, run_program


def add_arguments(parser: OneLineParser) -> None:
    for name in ("A", "B"):
        parser.add_argument(name, help="file or folder of a training")
    parser.add_argument("--rtol", type=positive, metavar="R", help="tolerance: |A - B| <= R * |A| (default: bitwise)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


PROGRAM = Program(__doc__, add_arguments, only=())
if __name__ == "__main__":
    PROGRAM.check_command_line()  # before pandas is imported

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from .common.errors import UserError, escape_control_characters, shorten
from .equality import NUMBERS, PLACE, compare_values, differing_entries, first_difference_of_traces, ulps
from .runs.reader import read_object
from .runs.schema import EVALUATIONS, SETTINGS, STEPS, TENSORS

STATE = "trainer_state.json"
SETTINGS_OF_STATE = "train_batch_size", "max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps"
TIMES = "seconds|time|timestamp|elapsed|duration|throughput|t?flops|mfu|tps|mem|memory"
TIME = re.compile(rf"per_sec|runtime|(?<![a-z])({TIMES})(?![a-z])", re.IGNORECASE)


class Training(NamedTuple):
    name: str
    table: pd.DataFrame  # with the columns step, quantity and value (float64)
    settings: Mapping[str, Any]
    left_out: set[str]  # quantities that are not compared
    trace: pd.DataFrame | None = None  # from `read_trace`


def main() -> int:
    _, options = PROGRAM.parse(sys.argv[1:])
    a, b = read(Path(options["A"])), read(Path(options["B"]))
    only_traces = a.trace is not None and b.trace is not None and (a.table.empty or b.table.empty)
    result = {"equal": True} if only_traces else compare(a, b, options["rtol"])
    if a.trace is not None and b.trace is not None:
        n, difference = first_difference_of_traces(a.trace, b.trace)
        is_equal = result.pop("equal") and not difference
        result |= {"traced_tensors_in_common": n, "trace": difference or "equal", "equal": is_equal}
    as_json = json.dumps(json.loads(json.dumps(result), parse_constant=str), indent=2)  # JSON has no NaN or infinity
    print(as_json if options["json"] else describe(result))
    return int(not result["equal"])


def compare(a: Training, b: Training, rtol: float | None = None) -> dict[str, Any]:
    """Return what `--json` prints. Raise UserError if the trainings have no number in common."""
    for one, other in ((a, b), (b, a)):
        if mixed := sorted(one.left_out & {*other.table["quantity"]}):
            raise UserError(f"{one.name}: {mixed[0]!r} is not always a number, as it is in {other.name}")
    values = compare_values(a.table, b.table, rtol)
    if values.empty:
        raise UserError(f"{a.name} and {b.name} have no quantity in common at the same step")
    delta = (values["A"] - values["B"]).abs()
    values["delta"] = delta.mask(delta.isna() & ~values["equal"], float("inf")).fillna(0.0)  # NaN and a number
    different = values[~values["equal"]]
    first = different[different["step"] == different["step"].min()]
    tables = {"in_A": a.table, "in_B": b.table, "common": values, "different": different}
    counts: Any = pd.DataFrame({name: table["quantity"].value_counts() for name, table in tables.items()})
    quantities = counts.fillna(0).astype(int).assign(max_difference=None, at_step=None, ULPs=None).to_dict("index")
    largest = values.sort_values(["delta", "equal"], ascending=[False, True], kind="stable")
    for step, name, x, y, _, delta in largest.drop_duplicates("quantity").to_numpy():
        quantities[name] |= {"max_difference": delta, "at_step": step, "ULPs": ulps(x, y)}
    entries = differing_entries(a.settings, b.settings)
    last = [int(side.table["step"].max()) for side in (a, b)]
    return {
        **{"A": a.name, "B": b.name, "last_step_of_A": last[0], "last_step_of_B": last[1]},
        "settings_that_differ": {name: {"A": x, "B": y} for name, (x, y) in entries.items()},
        "not_compared": sorted(a.left_out | b.left_out),
        "quantities": {name: quantities[name] for name in [*a.table["quantity"], *b.table["quantity"]]},
        "steps_in_common": values["step"].nunique(),
        "matches_within_rtol" if rtol else "exact_matches": int(values.groupby("step")["equal"].all().sum()),
        "first_difference": first.set_index("quantity")[["step", "A", "B"]].to_dict("index"),
        "equal": different.empty and last[0] == last[1],
    }


def describe(result: Mapping[str, Any]) -> str:
    """Return the result as `app.diff` and the pytest plugin print it: a line or a table per entry."""
    lines = []
    for name, value in ((name.replace("_", " "), value) for name, value in result.items() if value not in ({}, [])):
        if isinstance(value, dict):
            table = pd.DataFrame([*value.values()], [*value], dtype=object)
            text = table.map(lambda cell: "" if cell is None else shorten(cell, 40)).to_string()
            lines += [f"{name}:", *text.split("\n")]
        else:
            lines.append(f"{name}: {', '.join(value) if isinstance(value, list) else value}")
    return "\n".join(map(escape_control_characters, lines))


def read(path: Path) -> Training:
    """Read what a training has logged and traced. Raise UserError if it cannot be read."""
    try:
        file = path / TENSORS if path.is_dir() else path
        trace = read_trace(file) if file.is_file() else None
        if trace is None or any((path / name).is_file() for name in (STEPS, STATE)):
            return read_log(path)._replace(trace=trace)
        no_numbers = pd.DataFrame({"step": [0], "quantity": "", "value": 0.0})[:0]  # a trace of app.fixed_tree alone
        return Training(str(path), no_numbers, {}, set(), trace)
    except UserError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as problem:
        reason = getattr(problem, "strerror", None) or f"{type(problem).__name__}: {problem}"
        raise UserError(f"{path}: {shorten(reason, 200)}") from None


def read_log(path: Path) -> Training:
    """Read the numbers that a training has logged."""
    if (path / STEPS).is_file():
        lines = read_lines(path / EVALUATIONS) if (path / EVALUATIONS).is_file() else ()
        named = ({k if k == "step" else f"eval_{k}": row[k] for k in row if k != "rows"} for row in lines)
        return collect(path, [*read_lines(path / STEPS), *named], read_object(path, SETTINGS))
    if "tfevents" in path.name or any(path.glob("*tfevents*")):
        return collect(path, read_events(path))
    path = path / STATE if path.is_dir() else path
    if path.suffix == ".csv":
        rows = pd.read_csv(path, dtype=str, keep_default_na=False, index_col=False).to_dict("records")
        return collect(path, ({str(name): cell for name, cell in row.items() if cell} for row in rows))
    if path.name.endswith(STATE):
        state = json.loads(path.read_text(encoding="utf-8"))
        return collect(path, state["log_history"], {key: state.get(key) for key in SETTINGS_OF_STATE})
    return collect(path, read_lines(path))


def collect(name: object, rows: Iterable[Mapping[str, Any]], settings: Mapping[str, Any] | None = None) -> Training:
    """Collect the numbers in rows. Raise UserError if one has no step. Of several values at a step, the last counts."""
    cells: dict[tuple[int, str], float] = {}
    left_out, repeated = set[str](), []
    for n, row in enumerate(rows, 1):
        if n == 1 and "step" not in row:
            settings = row
            continue
        step = to_number(row.get("step", ""))
        if step is None or not step.is_integer():
            where = f"row {n}:" if cells or n > 2 else "row 1 or 2"  # one row of settings may be the first
            raise UserError(f"{name}: {where} must have a whole number `step`")
        for quantity, value in row.items():
            number, key = to_number(value), (int(step), quantity)
            if number is None or TIME.search(quantity):
                left_out.add(quantity)
            elif quantity != "step":
                if repr(cells.get(key, number)) != repr(number):
                    repeated.append(f"warning: {name}: row {n}: {quantity!r} again at step {key[0]}: the last counts")
                cells[key] = number
    if not cells:
        raise UserError(f"{name}: no row has a number besides `step`")
    sys.stderr.writelines(f"{escape_control_characters(line)}\n" for line in repeated[:1])
    table = pd.DataFrame([(*key, number) for key, number in cells.items()], columns=["step", "quantity", "value"])
    return Training(str(name), table[~table["quantity"].isin(left_out)], settings or {}, left_out)


def to_number(value: Any) -> float | None:
    """Return a number, or a text of one, as float64, and None for anything else. A null is NaN."""
    try:
        return float("nan" if value is None else value)
    except (TypeError, ValueError, OverflowError):
        return None


def read_trace(path: Path) -> pd.DataFrame | None:
    """Return the rows of tensors that `first_difference_of_traces` compares; None if the file has none."""
    with path.open("rb") as file:
        if b'"hash": ' not in file.readline():
            return None
    trace = pd.DataFrame([*read_lines(path)])[[*PLACE, "name", "hash", "norm"]]
    trace = trace.fillna(dict.fromkeys(NUMBERS, -1)).astype(dict.fromkeys(NUMBERS, int))
    return trace.assign(call=trace.groupby([*PLACE, "name"]).cumcount()).rename(columns={"hash": "value"})


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in a JSON Lines file."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield dict(json.loads(line))
            except (ValueError, TypeError) as problem:
                raise UserError(f"{path}: line {number}: must be a JSON object: {problem}") from None


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the scalars in TensorBoard's event files."""
    try:  # this accumulator turns every scalar into a tensor, as TensorFlow and fp64 scalars are written
        from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
        from tensorboard.util.tensor_util import make_ndarray
    except ModuleNotFoundError:
        raise UserError(f"{path}: event files are read by the package tensorboard: pip install tensorboard") from None
    log = EventAccumulator(str(path), {"tensors": 0}).Reload()
    for tag in log.Tags()["tensors"]:
        for event in log.Tensors(tag):
            value = make_ndarray(event.tensor_proto)
            if value.size == 1:
                yield {tag: value.item(), "step": event.step}


if __name__ == "__main__":
    sys.exit(run_program(main))
