"""Predict the memory of a training step on each rank, without loading weights or starting ranks.

    python -m app.plan --model bert-base-chinese --train_batch_size 32
    python -m app.plan --ranks 8 --strategy zero3 --precision bf16 --device_memory 24GiB

Any training flag applies. Rows are assumed to be padded to `--max_length`, which is the most memory that a batch can
need. docs/memory.md explains the formulas.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import torch
from matplotlib.figure import Figure
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig, PreTrainedModel

from app.cli import refuse_trainer_engines, settings_parser
from app.distributed.launcher import default_nproc_per_node
from app.errors import UserError, shorten
from app.experiments.program import run_program
from app.files import write_text
from app.model.activations import Activations, count_activations, empty_model
from app.model.hub import resolve_commit
from app.model.load import classifier_config, load_tokenizer
from app.runs.folder import create_folder
from app.runs.schema import RUNS
from app.settings import STRATEGIES, Settings
from app.strategies.planner import RankMemory, plan_memory
from app.training.build import read_and_split

RANKS = tuple(1 << exponent for exponent in range(11))  # 1 to 1,024
MIB = 2**20
UNITS = {"KiB": 2**10, "MiB": MIB, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class Plan:
    """What is known about a training step without computing it.

    Attributes:
        rows: the rows of a micro-batch.
        count: returns the activations of a number of rows.
    """

    settings: Settings
    config: PretrainedConfig
    model: PreTrainedModel
    ranks: int
    logical_ranks_per_rank: int
    rows: int
    count: Callable[[int], Activations]

    @property
    def activations(self) -> Activations:
        """The activations of a micro-batch."""
        return self.count(self.rows)

    def memory(self, strategy: str, ranks: int | None = None) -> RankMemory:
        """Return the memory of the rank that needs most."""
        cap = self.settings.ddp_bucket_cap_mb
        plans = plan_memory(
            self.model,
            strategy,
            ranks or self.ranks,
            self.logical_ranks_per_rank,
            self.settings.gradient_accumulation_steps,
            *([] if cap is None else [int(cap * MIB)]),
        )
        return max(plans, key=lambda one: one.total)

    def on_device(self, strategy: str, ranks: int | None = None) -> int:
        """Return the bytes that the device of that rank has to hold at the peak of a step, with activations."""
        memory = self.memory(strategy, ranks)
        offloaded = memory.state if strategy == "zero3" and self.settings.cpu_offload else 0
        return memory.total - offloaded + self.activations.peak


def main() -> int:
    return run_program(_main)


def _main() -> int:
    parser = settings_parser(__doc__)
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks; by default as `--nproc_per_node auto`")
    parser.add_argument("--device_memory", metavar="SIZE", help="such as 24GiB: print what fits")
    values = parser.values(sys.argv[1:])
    ranks, device_memory = values.pop("ranks"), values.pop("device_memory")
    budget = None if device_memory is None else parse_size(device_memory)
    settings = Settings(**values)
    refuse_trainer_engines(settings)
    plan = build_plan(settings, default_nproc_per_node(settings.use_cpu) if ranks is None else ranks)
    text = describe(plan, budget)
    folder = create_folder(settings.output_dir, RUNS / "plans")
    write_text(folder / "memory.md", text)
    draw(plan).savefig(folder / "memory.png", dpi=150)
    print(f"{text}\nwritten to {folder}/: memory.md, memory.png")
    return 0


def parse_size(text: str) -> int:
    """Convert a size such as `24GiB` or `1.5 TB` to bytes.

    Raises:
        UserError: it is not a number with a unit.
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([KMGT]i?B)", text.strip())
    if match is None or not float(match[1]):
        raise UserError(f"--device_memory {shorten(text)}: must be a number with a unit, such as 24GiB or 80GB")
    return int(float(match[1]) * UNITS[match[2]])


def build_plan(settings: Settings, ranks: int) -> Plan:
    """Read the data, divide the batch, and count the activations of a micro-batch.

    Raises:
        UserError: the data, the batch size or the model is invalid.
    """
    if ranks < 1:
        raise UserError(f"--ranks {ranks}: must be 1 or more")
    table, split, batches = read_and_split(settings, ranks)
    commit = resolve_commit(settings)
    tokenizer = load_tokenizer(settings, table.texts.iloc[split.train], commit)
    config = classifier_config(settings, table.class_names, tokenizer, commit)
    precision, checkpointing = settings.precision or "fp32", settings.activation_checkpointing
    with FakeTensorMode():
        model = empty_model(config, precision, checkpointing)
    count = activation_counter(config, settings)
    return Plan(settings, config, model, ranks, batches.logical_ranks_per_rank, batches.micro_size, count)


def activation_counter(config: PretrainedConfig, settings: Settings) -> Callable[[int], Activations]:
    """Return a function that counts the activations of a number of rows of `--max_length` tokens."""
    device = torch.device("cuda" if torch.cuda.is_available() and not settings.use_cpu else "cpu")

    @cache
    def count(rows: int) -> Activations:
        return count_activations(
            config, rows, settings.max_length, device, settings.precision or "fp32", settings.activation_checkpointing
        )

    return count


def describe(plan: Plan, budget: int | None) -> str:
    """Return the plan as Markdown.

    Args:
        budget: the memory of a device in bytes, or None.
    """
    settings = plan.settings
    n = sum(parameter.numel() for parameter in plan.model.parameters())
    parts = [
        f"# Memory of a training step\n\n{settings.model}: {n / 1e6:.1f} M parameters; {plan.ranks} rank(s), "
        f"{plan.rows} rows x {settings.max_length} tokens per micro-batch, {settings.precision or 'fp32'}"
        f"{', activation checkpointing' if settings.activation_checkpointing else ''}\n",
        f"## The rank that needs most, in MiB\n\n{table_of_parts(plan)}",
        f"## By the number of ranks, with {plan.rows} rows on each, in MiB\n\n{table_of_ranks(plan)}",
        f"## Activations, in MiB\n\n{table_of_activations(plan)}",
    ]
    if budget is not None:
        parts.append(f"## What fits into {budget / MIB:,.0f} MiB\n\n{table_of_what_fits(plan, budget)}")
    return "\n".join(parts)


def table_of_parts(plan: Plan) -> str:
    """Return a table with one line per strategy and one column per kind of memory."""
    rows = []
    for strategy in STRATEGIES:
        memory = plan.memory(strategy)
        parts = (memory.parameters, memory.gradients, memory.optimizer, memory.gathered, memory.exchange)
        total = memory.total + plan.activations.peak
        rows.append([strategy, *map(mib, (*parts, memory.accumulated, plan.activations.peak, total))])
    names = ["parameters", "gradients", "optimizer", "gathered", "exchange", "accumulated", "activations", "together"]
    return markdown_table(["strategy", *names], rows)


def table_of_ranks(plan: Plan) -> str:
    """Return a table with one line per number of ranks and one column per strategy."""
    rows = [[str(ranks), *(mib(plan.on_device(strategy, ranks)) for strategy in STRATEGIES)] for ranks in RANKS]
    return markdown_table(["ranks", *STRATEGIES], rows)


def table_of_activations(plan: Plan) -> str:
    """Return a table of what precision and activation checkpointing save."""
    rows = []
    for precision in ("fp32", "bf16"):
        for checkpointing in (False, True):
            settings = replace(plan.settings, precision=precision, bf16=False, activation_checkpointing=checkpointing)
            found = activation_counter(plan.config, settings)(plan.rows)
            rows.append([precision, "yes" if checkpointing else "no", mib(found.saved), mib(found.peak)])
    return markdown_table(["precision", "checkpointing", "kept for the backward pass", "peak"], rows)


def table_of_what_fits(plan: Plan, budget: int) -> str:
    """Return a table with the largest micro-batch of each strategy that fits into the memory of a device."""
    rows = []
    for strategy in STRATEGIES:
        free = budget - (plan.on_device(strategy) - plan.activations.peak)
        largest = largest_that_fits(free, plan.count)
        rows.append([strategy, mib(max(0, free)), str(largest) if largest else "does not fit"])
    return markdown_table(["strategy", "left for activations", "rows per micro-batch"], rows)


def largest_that_fits(free: int, count: Callable[[int], Activations]) -> int:
    """Return the largest number of rows whose activations need at most `free` bytes."""
    if count(1).peak > free:
        return 0
    fits, too_many = 1, 2
    while count(too_many).peak <= free:
        fits, too_many = too_many, 2 * too_many
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if count(middle).peak <= free else (fits, middle)
    return fits


def draw(plan: Plan) -> Figure:
    """Draw the memory of each strategy as a bar, divided into its parts."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.add_subplot(xlabel="MiB on the rank that needs most")
    names = [field.name for field in fields(RankMemory)]
    parts = {name: [getattr(plan.memory(strategy), name) for strategy in STRATEGIES] for name in names}
    parts["activations"] = [plan.activations.peak] * len(STRATEGIES)
    left = [0.0] * len(STRATEGIES)
    for name, sizes in parts.items():
        if any(sizes):
            widths = [size / MIB for size in sizes]
            axes.barh(STRATEGIES, widths, left=left, label=name)
            left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(parts), frameon=False, fontsize="small")
    return figure


def mib(size: int) -> str:
    """Return a number of bytes in MiB."""
    return f"{size / MIB:,.1f}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose columns, except for the first, are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    sys.exit(main())
