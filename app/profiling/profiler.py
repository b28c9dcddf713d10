"""Profile training steps with torch.profiler (`--profile`): a trace of each rank, and a summary of where time goes."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, schedule
from tqdm import tqdm

from ..common.files import commit, write_json, write_text
from ..distributed.collectives import all_gather_object, stop_or_warn, write_on_ranks
from ..distributed.world import World
from ..record.run_record import RunRecord
from ..runs.schema import PROFILE, PROFILE_STAGING, PROFILE_SUMMARY, PROFILE_TEXT, TRACE
from .breakdown import CATEGORIES, Event, StepTimes, divide_steps, mean

# The first steps are not typical: DDP and FSDP2 arrange their buffers, and AdamW creates its state.
SKIPPED, WARM_UP = 3, 1  # steps; torch.profiler starts in the warm-up and keeps nothing of it
LONGEST_END = 8192  # bytes, of a trace's last entry
FIRST = SKIPPED + WARM_UP + 1  # the first step that is profiled


class StepProfiler:
    """Profile the steps from the fifth one on, and write the result to the run folder after the last of them.

    Use as a context manager around the training. If the training ends early inside it, because it fails or is
    preempted, nothing is written. A profile of the run before a restart is replaced only by a complete one.
    """

    def __init__(self, record: RunRecord, total_steps: int) -> None:
        self.record, self.world, self.requested = record, record.world, record.settings.profile
        self.folder = record.folder / PROFILE
        self.step_number, self.first = record.resume.step, record.resume.step + FIRST
        self.last = min(self.first + self.requested - 1, total_steps)
        self.profile: profile | None = None

    def __enter__(self) -> StepProfiler:
        if self.first <= self.last:
            self.profile = start_profiler(self.last - self.first + 1, self.world.device)
        elif self.requested:
            self.world.print_main(f"--profile {self.requested}: not done, as the run ends before step {self.first}")
        return self

    def step(self) -> None:
        """Call this after each training step. Collective after the last step that is profiled."""
        if self.profile is None:
            return
        self.step_number += 1
        if self.step_number >= self.first - 1 and self.world.device.type == "cuda":
            torch.cuda.synchronize()  # otherwise the step's kernels would run in a later one
        if self.step_number < self.last:
            self.profile.step()
            return
        finished, self.profile = self.profile, None
        finished.stop()
        self._write(finished)
        self.record.steps.start_clock()  # writing is not training time

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if self.profile is not None and self.world.device.type == "cpu":
            self.profile.stop()  # on a GPU, it would wait for kernels, which may wait for a rank that has failed
        if self.profile is not None and failure is None:  # early stopping
            self.world.print_main(f"--profile {self.requested}: not done, as the run ends before step {self.last}")
        self.profile = None

    def _write(self, finished: profile) -> None:
        """Write the traces of all ranks and the summary, or nothing at all. Collective.

        Raises:
            RunError: they cannot be written, and `--on_save_failure` is `stop`.
        """
        events = events_of(finished)
        warn_without_kernels(events, self.world)
        ranks = all_gather_object(divide_steps(events), self.world)
        staging = self.folder.with_name(PROFILE_STAGING)

        def create() -> None:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()

        def write_summary() -> None:
            text = describe(ranks, self.first)
            write_text(staging / PROFILE_TEXT, f"```\n{text}\n```\n")
            write_json(staging / PROFILE_SUMMARY, summary_content(ranks, self.first))
            commit(staging, self.folder)
            tqdm.write(f"{text}\n{'traces':>21}  {self.folder}/")  # above the progress bar

        def clean_up() -> None:
            if self.world.is_main_process:
                shutil.rmtree(staging, ignore_errors=True)

        on_failure, trace = self.record.settings.on_save_failure, staging / TRACE.format(rank=self.world.rank)
        with stop_or_warn(self.folder, on_failure=on_failure, warn=self.world.print_main, clean_up=clean_up):
            write_on_ranks(create, self.folder, self.world, main_only=True)
            write_on_ranks(lambda: write_trace(finished, trace), self.folder, self.world)
            write_on_ranks(write_summary, self.folder, self.world, main_only=True)


def hide_profiler_messages() -> None:
    """Hide kineto's messages about starting and stopping. Call it before profiling."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # above the level of every message


def start_profiler(steps: int, device: torch.device) -> profile:
    """Start a profiler that records a number of steps after the first ones; call its `step()` after each step."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    hide_profiler_messages()
    profiler = profile(
        activities=activities, schedule=schedule(wait=SKIPPED, warmup=WARM_UP, active=steps, repeat=1), acc_events=True
    )
    profiler.start()
    return profiler


def events_of(finished: profile) -> list[Event]:
    assert finished.profiler is not None
    assert finished.profiler.kineto_results is not None
    recorded = finished.profiler.kineto_results.events()
    # A kernel is linked to the operator of the host that has launched it.
    on_host = [e for e in recorded if e.device_type() == DeviceType.CPU and not e.linked_correlation_id()]
    started = {e.correlation_id(): e.start_ns() for e in on_host}
    events = [Event(e.name(), e.start_ns(), e.end_ns(), e.start_thread_id(), e.is_user_annotation()) for e in on_host]
    for e in recorded:
        if e.device_type() == DeviceType.CUDA and not e.is_user_annotation():  # those repeat ranges of the host
            launched = started.get(e.linked_correlation_id(), e.start_ns())
            events.append(Event(e.name(), e.start_ns(), e.end_ns(), launched=launched))
    return events


def warn_without_kernels(events: Sequence[Event], world: World) -> None:
    """Warn if the GPU's activity is missing, such as in a container without the permission to read it."""
    if world.device.type == "cuda" and not any(event.launched is not None for event in events):
        world.print_main("warning: --profile: CUPTI has recorded no kernels, so the times are those of the host")


def write_trace(finished: profile, path: Path) -> None:
    """Write the trace for Perfetto, compressed. Raise `OSError` if it cannot be written completely."""
    plain = path.with_suffix("")
    finished.export_chrome_trace(str(plain))
    with plain.open("rb") as file:
        file.seek(max(0, plain.stat().st_size - LONGEST_END))
        end = file.read().rstrip()
        # kineto does not report it if the disk is full. Its last entry is `traceName`, the path of the file.
        if not (b'"traceName"' in end and end.endswith(b"}")):
            raise OSError(errno.ENOSPC, "the trace is incomplete: the disk may be full")
    with plain.open("rb") as source, gzip.open(path, "wb") as target:
        shutil.copyfileobj(source, target)
    plain.unlink()


def summary_content(ranks: Sequence[Sequence[StepTimes]], first_step: int) -> dict[str, object]:
    """Return the content of summary.json: the times of each rank's steps, counted from `first_step`."""
    return {
        "steps": list(range(first_step, first_step + len(ranks[0]))),
        "unit": "ms",
        "ranks": [
            [step.parts | {"step": step.total, "communication": step.communication} for step in steps]
            for steps in ranks
        ],
    }


def describe(ranks: Sequence[Sequence[StepTimes]], first_step: int) -> str:
    """Return a table of the mean times: one line per part of the step. Arguments as for `summary_content`."""
    by_rank = [mean(steps) for steps in ranks]
    overall = mean(by_rank)
    last_step = first_step + len(ranks[0]) - 1
    lines = [f"{'profile':>21}  steps {first_step} to {last_step}, mean of {len(ranks)} rank(s) (lowest to highest)"]
    times = {name: [rank.parts[name] for rank in by_rank] for name in CATEGORIES}
    for name, of_ranks in (times | {"step": [rank.total for rank in by_rank]}).items():
        milliseconds = sum(of_ranks) / len(of_ranks)
        share = milliseconds / overall.total
        lines.append(f"{name:>21}  {milliseconds:8.2f} ms {share:6.1%}  ({min(of_ranks):.2f} to {max(of_ranks):.2f})")
    if overall.communication:
        hidden = overall.hidden / overall.communication
        lines.append(f"{'communication':>21}  {overall.communication:8.2f} ms, {hidden:.0%} hidden behind computation")
    return "\n".join(lines)
