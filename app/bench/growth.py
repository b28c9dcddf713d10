"""Benchmark: seconds and memory of a start, from 10,000 to 1,000,000 rows.

    python -m app.bench.growth --csv reviews.csv
    python -m app.bench.growth --rows 10000 100000 --ranks 4

For each number of rows, writes a CSV (the reviews of `--csv`, repeated, with a few characters changed in each copy) and
trains one step of `tiny-bert` on it with app.ddp_loop, on the CPU: first with an empty cache ("cold"), then again
("warm"). Both jobs also evaluate the test rows, a tenth of all rows. Writes growth.html and growth.json into
`--output_dir`.
"""

from __future__ import annotations

import csv
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import torch
from markupsafe import Markup
from matplotlib.figure import Figure as Drawing

from ..cli import OneLineParser, command_line
from ..common.charts import MARKERS, SERIES_COLORS, render_svg, show_values
from ..common.errors import RunError, escape_control_characters
from ..common.files import write_json, write_text
from ..common.formats import MIB
from ..common.machine import describe_machine
from ..common.paths import PACKAGE
from ..data.reviews import ReviewTable, read_reviews
from ..distributed.environment import default_threads
from ..distributed.launcher import TorchrunJob, torchrun_command
from ..flags import add_growth_flags
from ..program import run_program
from ..runs.folder import create_folder
from ..runs.schema import RUNS, STEPS
from ..setting_groups import TINY_BERT
from ..settings import Settings
from .page import Figure, Section, Table, as_html, as_markdown

CHANGES = 3  # characters that are changed in each copy of a review
POLL_SECONDS = 0.1
FLAGS = (
    *("--model", TINY_BERT, "--use_cpu", "--max_steps", "1", "--logging_steps", "1"),
    *("--eval_strategy", "no", "--save_strategy", "no"),
)
# The file of the cache whose last byte ends a phase of a cold start.
PHASES = {"read": "datasets/**/*.arrow", "split, vocabulary": "vocabulary-*.json", "tokenize": "tokens-*.arrow"}
NOTE = (
    "Seconds from the start of torchrun to the end of each phase, which is when its file is in the cache. Memory: the "
    "peak of each rank's private memory in MiB. It does not include mapped files, which the ranks share and whose "
    "pages the kernel may drop."
)


@dataclass
class Start:
    """What was measured of one job.

    Attributes:
        phases: when each phase of a cold start ended, in seconds after the start of torchrun; empty for a warm start.
        first_step: when the first step was recorded.
        memory_before: the peak of each rank's private memory in bytes, until then.
        memory: the same, until the end of the job.
    """

    phases: dict[str, float] = field(default_factory=dict)
    first_step: float | None = None
    memory_before: dict[int, int] = field(default_factory=dict)
    memory: dict[int, int] = field(default_factory=dict)


def main() -> int:
    parser = OneLineParser(description=__doc__)
    add_growth_flags(parser)
    arguments = parser.parse_args()
    table = read_reviews(Settings(csv=arguments.csv).csv_path)
    folder = create_folder(arguments.output_dir, RUNS / "growth")
    results: dict[int, dict[str, Start]] = {}
    for n in sorted(set(arguments.rows)):
        with tempfile.TemporaryDirectory(prefix="growth-", dir=folder) as name:
            path = Path(name, "reviews.csv")
            write_rows(path, table, n)
            results[n] = {
                kind: measure(path, Path(name, kind), arguments.ranks, log=folder / f"{n}-{kind}.log")
                for kind in ("cold", "warm")
            }
        print(f"{n:,} rows: " + ", ".join(f"{kind} {start.first_step:.1f} s" for kind, start in results[n].items()))
    facts = {
        "model": TINY_BERT,
        "ranks": str(arguments.ranks),
        **describe_machine(torch.device("cpu")),
        "command": command_line(),
    }
    report = section(results)
    print(f"\n{as_markdown(report)}")
    write_json(folder / "growth.json", {"machine": facts, "sections": {report.name: report.data}})
    write_text(folder / "growth.html", as_html("Growth", facts, [report], json_name="growth.json"))
    print(escape_control_characters(f"written to {folder}/: growth.html, growth.json"))
    return 0


def write_rows(path: Path, table: ReviewTable, n: int) -> None:
    """Write the reviews `n / len(table)` times. All rows have the length and label of a real review."""
    generator, texts = random.Random(0), table.texts.tolist()
    order = generator.sample(range(len(table)), len(table))  # the first rows of the file may be of one class
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["label", "review"])
        for row in range(n):
            source = order[row % len(table)]
            characters = list(texts[source])
            for _ in range(CHANGES if row >= len(table) else 0):
                other = generator.choice(texts)
                characters[generator.randrange(len(characters))] = generator.choice(other)
            # The changes may leave only whitespace.
            text = "".join(characters)
            writer.writerow([table.class_names[table.labels[source]], text if text.strip() else texts[source]])


def measure(path: Path, run: Path, ranks: int, *, log: Path) -> Start:
    """Train one step and evaluate. The jobs on one file share a cache next to it.

    Raises:
        RunError: the job failed.
    """
    cache = path.parent / "cache"
    flags = ["--csv", path, "--cache_dir", cache, "--output_dir", run, *FLAGS]
    command = torchrun_command(f"{PACKAGE}.ddp_loop", flags, nproc_per_node=ranks)
    threads = default_threads(ranks)
    start, cold, started = Start(), not cache.exists(), time.time()
    with TorchrunJob(command, environment={"OMP_NUM_THREADS": str(threads)}, stdout=log) as job:
        while job.running:
            _sample(start, job, ranks)
            steps = run / STEPS.name
            if start.first_step is None and steps.exists() and steps.stat().st_size:
                start.first_step = time.time() - started
                start.memory_before = dict(start.memory)
            time.sleep(POLL_SECONDS)
        if job.wait() or start.first_step is None:
            raise RunError(f"a job failed: see {log}")
    if cold:
        start.phases = {name: next(cache.glob(pattern)).stat().st_mtime - started for name, pattern in PHASES.items()}
    return start


def _sample(start: Start, job: TorchrunJob, ranks: int) -> None:
    for rank in range(ranks):
        with suppress(psutil.Error):  # it has ended
            if (process := job.find_rank(rank)) is not None:
                memory = process.memory_info()
                private = memory.rss - getattr(memory, "shared", 0)
                start.memory[rank] = max(start.memory.get(rank, 0), private)


def section(results: Mapping[int, Mapping[str, Start]]) -> Section:
    header = ["rows", "start", *PHASES, "first step", "memory until then", "until the end"]
    rows = []
    for n, starts in results.items():
        for kind, start in starts.items():
            ends = [f"{start.phases[name]:.1f}" if name in start.phases else "–" for name in PHASES]
            peaks = (start.memory_before, start.memory)
            memory = [" ".join(f"{peak / MIB:,.0f}" for peak in of_ranks.values()) for of_ranks in peaks]
            rows.append([f"{n:,}", kind, *ends, f"{start.first_step:.1f}", *memory])
    by_kind = {kind: {n: starts[kind] for n, starts in results.items()} for kind in ("cold", "warm")}
    seconds = {kind: {n: one.first_step or 0.0 for n, one in starts.items()} for kind, starts in by_kind.items()}
    private = {
        kind: {n: max(one.memory.values()) / MIB for n, one in starts.items()} for kind, starts in by_kind.items()
    }
    parts: list[Table | Figure] = [
        Table("starts", header, rows, NOTE),
        Figure("seconds to the first step", chart("seconds to the first step", "seconds", seconds)),
        Figure("private memory", chart("private memory of the largest rank", "MiB", private)),
    ]
    data = {f"{n}": {kind: asdict(start) for kind, start in starts.items()} for n, starts in results.items()}
    return Section("growth", "Growth", ["From the start of a job to its first step, and to its end."], parts, data)


def chart(title: str, label: str, series: Mapping[str, Mapping[int, float]]) -> Markup:
    """Plot values over the number of rows, on logarithmic axes."""

    def draw(figure: Drawing) -> None:
        axes = figure.add_subplot(xlabel="rows", ylabel=label)
        for (name, points), color, marker in zip(series.items(), SERIES_COLORS, MARKERS, strict=False):
            axes.plot(list(points), list(points.values()), marker=marker, color=color, label=name)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        show_values(axes.xaxis, "{:,.0f}".format)
        axes.legend()

    return render_svg(300, title, draw)


if __name__ == "__main__":
    sys.exit(run_program(main))
