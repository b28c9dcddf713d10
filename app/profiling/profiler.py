"""Profile training steps with torch.profiler (`--profile`): a trace of each rank, and a summary of where time goes.

On GPUs, there are only the traces: the times of the host say little there. Perfetto shows them, and Holistic Trace
Analysis (HTA) divides the steps of all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from ..common.files import write_json, write_text
from ..distributed.collectives import all_gather_object, stop_or_warn, write_on_ranks
from ..distributed.world import World
from ..runs.schema import PROFILE, PROFILE_SUMMARY, PROFILE_TEXT, TRACE
from ..settings import Settings
from .breakdown import divide_steps

# The first steps are not typical: DDP and FSDP2 arrange their buffers, and AdamW creates its state.
SKIPPED, WARM_UP = 3, 1  # steps; torch.profiler starts in the warm-up and keeps nothing of it
FIRST = SKIPPED + WARM_UP + 1  # the first step that is profiled


class StepProfiler:
    """Profile the steps from the fifth one on, and write the result to the run folder after the last of them.

    Use as a context manager around the training. If the training ends early inside it, because it fails or is
    preempted, nothing is written.
    """

    def __init__(self, settings: Settings, world: World, folder: Path, *, step: int, total_steps: int) -> None:
        """`folder` is the run's, and `step` the last step before this process was started."""
        self.world, self.requested, self.on_failure = world, settings.profile, settings.on_save_failure
        self.folder = folder / PROFILE
        self.step_number, self.first = step, step + FIRST
        self.last = min(self.first + self.requested - 1, total_steps)
        self.profile: profile | None = None

    def __enter__(self) -> StepProfiler:
        if self.first <= self.last:
            self.profile = start_profiler(self.last - self.first + 1, self.world.device)
        return self

    def step(self) -> bool:
        """Call this after each training step. Collective after the last step that is profiled.

        Returns:
            Whether that was the last step, and the files have been written.
        """
        self.step_number += 1
        if self.profile is None:
            return False
        if self.step_number >= self.first - 1 and self.world.device.type == "cuda":
            torch.cuda.synchronize()  # otherwise the step's kernels would run in a later one
        if self.step_number < self.last:
            self.profile.step()
            return False
        finished, self.profile = self.profile, None
        finished.stop()
        self._write(finished)
        return True

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if self.profile is not None and self.world.device.type == "cpu":
            self.profile.stop()  # on a GPU, it would wait for kernels, which may wait for a rank that has failed
        end = max(self.first, self.last)
        if failure is None and self.step_number < end:  # the run is short, or has stopped early
            self.world.print_main(f"--profile: not done, as the run ends before step {end}")
        self.profile = None

    def _write(self, finished: profile) -> None:
        """Write the traces of all ranks, and last the summary. Collective.

        Raises:
            RunError: they cannot be written, and `--on_save_failure` is `stop`.
        """
        on_gpus = self.world.device.type == "cuda"
        ranks = [] if on_gpus else all_gather_object(divide_steps(finished.events()), self.world)

        def write_trace() -> None:
            self.folder.mkdir(exist_ok=True)
            finished.export_chrome_trace(str(self.folder / TRACE.format(rank=self.world.rank)))

        def write_summary() -> None:
            if ranks:
                steps, times = [*range(self.first, self.last + 1)], [of_rank.to_dict("records") for of_rank in ranks]
                write_json(self.folder / PROFILE_SUMMARY, {"steps": steps, "unit": "ms", "ranks": times})
                text = describe(ranks, steps)
                write_text(self.folder / PROFILE_TEXT, f"```\n{text}\n```\n")
                self.world.print_main(text)
            self.world.print_main(f"{'traces':>21}  {self.folder}/")

        try:
            write_on_ranks(write_trace, self.world)
            write_on_ranks(write_summary, self.world, main_only=True)
        except OSError as problem:
            stop_or_warn(self.folder, problem, self.on_failure, warn=self.world.print_main)


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


def describe(ranks: Sequence[pd.DataFrame], steps: Sequence[int]) -> str:
    """Return a table of the mean times of a step, from the frames of all ranks that `divide_steps` returned."""
    means = pd.DataFrame([of_rank.mean() for of_rank in ranks])
    table = pd.DataFrame({"mean": means.mean(), "lowest": means.min(), "highest": means.max()})
    table["share"] = means.mean() / means["step"].mean()
    title = f"profile of steps {steps[0]} to {steps[-1]}: milliseconds of {len(ranks)} rank(s)"
    return f"{title}\n{table.to_string(float_format='{:.3f}'.format)}"
