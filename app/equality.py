"""Which values of two tables, settings or traces are equal in every bit. `app.diff` and `app.report` ask it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

# Of a line in tensors.jsonl. Logical rank and micro-batch are null for what all logical ranks share.
NUMBERS = {"step": "step", "logical_rank": "logical rank", "micro_batch": "micro-batch"}
PLACE = [*NUMBERS, "phase"]
NO_SETTINGS = {"command", "date", "launchers", "output_dir"}  # they differ between any two runs


def compare_values(a: pd.DataFrame, b: pd.DataFrame, rtol: float | None = None) -> pd.DataFrame:
    """Return the values at the same places of two tables as A and B, by step and in a's order, and which are `equal`.

    A place is all other columns that both have. Numbers are equal if their bits are, if both are NaN, or if they differ
    by at most rtol times that of a.
    """
    both = a.rename(columns={"value": "A"}).merge(b.rename(columns={"value": "B"}))
    both["equal"] = both["A"].map(repr) == both["B"].map(repr)  # 0.0 == -0.0, and NaN != NaN, unlike these texts
    if rtol:
        both["equal"] |= np.isclose(both["B"], both["A"], rtol=rtol, atol=0.0)
    return both.sort_values("step", kind="stable", ignore_index=True)


def ulps(x: float, y: float) -> int | None:
    """Return how many fp32 numbers it is from one fp32 number to another, or else fp64 numbers; None if not finite."""
    fp64 = np.array([x, y], dtype=np.float64)
    if not np.isfinite(fp64).all():
        return None
    with np.errstate(over="ignore"):
        fp32 = fp64.astype(np.float32)
    # The bits of a positive number are its place among them. Python's integers do not overflow, as numpy's would.
    bits: list[int] = (abs(fp32).view(np.int32) if (fp32 == fp64).all() else abs(fp64).view(np.int64)).tolist()
    return abs(bits[0] - bits[1]) if (x < 0) == (y < 0) else sum(bits)


def differing_entries(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the entries that differ. One that only one of both has is unknown in the other, and does not count."""
    flat_a, flat_b = (pd.json_normalize(dict(settings)).astype(object).iloc[0].to_dict() for settings in (a, b))
    return {str(k): (x, flat_b[k]) for k, x in flat_a.items() if k not in NO_SETTINGS and flat_b.get(k, x) != x}


def first_difference_of_traces(a: pd.DataFrame, b: pd.DataFrame) -> tuple[int, str | None]:
    """Return how many tensors two traces have in common, and one line about the first that differs, if any.

    Args:
        a: a row for each tensor: PLACE, `name`, `call` (a module may be called again), `value` (its hash) and `norm`.
    """
    both = compare_values(a.rename(columns={"norm": "norm_a"}), b.rename(columns={"norm": "norm_b"}))
    if both["equal"].all():
        return len(both), _only_in_one(a, b)
    first = int(both["equal"].argmin())
    x: Any = both.loc[first]
    n = int((both[PLACE][:first] == x[PLACE]).all(axis=1).sum())
    where = [f"{name} {x[key]}" for key, name in NUMBERS.items() if x[key] >= 0]
    things = "outputs" if x["phase"] == "forward" else f"{x['phase']}s"
    phase = "in the forward pass" if x["phase"] == "forward" else f"among the {things}"
    distance = ulps(x["norm_a"], x["norm_b"])
    norms = "a norm is not finite" if distance is None else f"norms differ by {distance} ULP"
    line = f"{', '.join(where)}: `{x['name']}` differs first {phase} ({norms})"
    return len(both), f"{line}; the {n} {things} before it are equal"


def _only_in_one(a: pd.DataFrame, b: pd.DataFrame) -> str | None:
    """Describe the first tensor of a step in both traces that only one has, or which steps they have."""
    steps = {*a["step"]} & {*b["step"]}
    if not steps:
        return "no step is traced in both"
    rows = pd.concat([a, b])[[*PLACE, "name", "call"]]
    single = rows[rows["step"].isin(steps)].drop_duplicates(keep=False)
    if not single.empty:
        return f"step {single['step'].iloc[0]}: `{single['name'].iloc[0]}` is in one of the traces only"
    last = a["step"].max(), b["step"].max()
    return f"equal up to step {min(last)}; the last steps are {last[0]} and {last[1]}" if last[0] != last[1] else None
