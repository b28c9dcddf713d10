"""Each rule of fake GPUs catches a planted defect, and accepts correct programs.

As a script, this runs all programs on two ranks, one after another, and writes what each one raised and what the report
then held into a JSON file for each rank: `RESULTS/<rank>.json`.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import ON_FAKE_GPUS, PROJECT, Job

from fake_cuda.report import REPORT
from fake_cuda.requirement import require_fake_gpus

pytestmark = [pytest.mark.launched, pytest.mark.slow]
RANK = int(os.environ.get("RANK", 0))
SIZE = 1000
Program = Callable[[], Any]


def on_gpu(**options: Any) -> torch.Tensor:
    return torch.ones(SIZE, **({"device": "cuda"} | options))


def copy_to_cpu() -> torch.Tensor:
    return on_gpu().to("cpu", non_blocking=True)


def initialize(**device: Any) -> None:
    dist.init_process_group("nccl", **device)


ELSEWHERE = "Expected all tensors to be on the same device, but found cuda:"
WITHOUT_GROUP: dict[str, tuple[Program, str]] = {  # errors before there is a group, with what their texts contain
    "a group without a device": (initialize, "device_id=None, but the current device is cuda:"),
    "a group of another device": (lambda: initialize(device_id=torch.device("cuda", 1 - RANK)), "current device is"),
}
ERRORS: dict[str, tuple[Program, str]] = {  # others
    "tensors on two GPUs": (lambda: on_gpu(device="cuda:0") + on_gpu(device="cuda:1"), ELSEWHERE),
    "tensors on GPU and CPU": (lambda: on_gpu() + torch.ones(SIZE), ELSEWHERE),
    "a CPU scalar for a list of tensors": (lambda: torch._foreach_mul_([on_gpu()], torch.tensor(2.0)), ELSEWHERE),
    "a stack with a CPU scalar": (lambda: torch.stack([on_gpu().sum(), torch.tensor(2.0)]), ELSEWHERE),
    "pinned GPU memory": (lambda: on_gpu(pin_memory=True), "only CPU tensors can be pinned"),
    "numpy of a GPU tensor": (lambda: on_gpu().numpy(), ".numpy() is not supported"),
    "NCCL with a CPU tensor": (lambda: dist.all_reduce(torch.ones(SIZE)), "No backend type associated with"),
    "NCCL with another GPU's tensor": (lambda: dist.all_reduce(on_gpu(device=f"cuda:{1 - RANK}")), "rank's GPU is"),
    "NCCL with gaps": (lambda: dist.all_reduce(on_gpu().view(10, 100).t()[:2]), "Tensors must be contiguous"),
    "NCCL with a type that it lacks": (lambda: dist.all_reduce(on_gpu(dtype=torch.int16)), "NCCL has no torch.int16"),
    "gloo with a GPU tensor": (lambda: dist.all_reduce(on_gpu(), group=dist.new_group(backend="gloo")), "a gloo group"),
}
WAITS: dict[str, tuple[Program, str]] = {  # with how the report names the only wait
    "item": (lambda: on_gpu().sum().item(), "item()"),
    "cpu": (lambda: on_gpu().cpu(), "copy to the host"),
    "tolist": (lambda: on_gpu().tolist(), "copy to the host"),
    "nonzero": (lambda: on_gpu().nonzero(), "nonzero"),
    "a boolean index": (lambda: on_gpu()[on_gpu() > 0], "index"),
    "a copy from pageable memory": (
        lambda: (on_gpu(), torch.ones(SIZE).to("cuda", non_blocking=True)),
        "copy to the device, from pageable memory",
    ),
    "a query": (lambda: (on_gpu(), torch.cuda.current_stream().record_event().query()), "Event.query()"),
    "synchronize": (lambda: (on_gpu(), torch.cuda.synchronize()), "torch.cuda.synchronize()"),
    "a second read of the same result": (lambda: [total := on_gpu().sum(), total.item(), total.item()], "item()"),
}


def use_collective_too_early() -> None:
    tensor = on_gpu()
    work = dist.all_reduce(tensor, async_op=True)
    tensor.mul_(2)
    work.wait()


def overwrite_batch_while_it_is_copied() -> None:
    batch = torch.ones(SIZE).pin_memory()
    batch.to("cuda", non_blocking=True)
    batch.zero_()


def use_streams(first_waits: bool = True, second_waits: bool = True, recorded: bool = True) -> None:
    """Another stream reads a tensor, which is freed. The first stream reuses its memory, and reads the result."""
    tensor, first, second = on_gpu(), torch.cuda.current_stream(), torch.cuda.Stream()
    if second_waits:
        second.wait_stream(first)
    with torch.cuda.stream(second):
        total = tensor.sum()
    if recorded:
        tensor.record_stream(second)
    del tensor
    torch.zeros(SIZE, device="cuda")
    if first_waits:
        first.wait_event(second.record_event())
    total.mul_(2)


RACES: dict[str, tuple[Program, str]] = {  # with what the report's line contains
    "result of a collective before it is there": (use_collective_too_early, "before: nccl allreduce_"),
    "sum of a copy that is not there yet": (lambda: copy_to_cpu().sum(), "the host reads without waiting"),
    "numpy of a copy that is not there yet": (lambda: copy_to_cpu().numpy(), "the host reads without waiting"),
    "list of a copy that is not there yet": (lambda: copy_to_cpu().tolist(), "the host reads without waiting"),
    "batch overwritten while it is copied": (overwrite_batch_while_it_is_copied, "the host writes without waiting"),
    "a stream that does not wait": (lambda: use_streams(second_waits=False), "without waiting for stream 0: sum"),
    "result of a stream": (lambda: use_streams(first_waits=False), "stream 0 writes without waiting for stream"),
    "memory reused while a stream reads it": (lambda: use_streams(recorded=False), "before: sum"),
}


def draw_from(seed: Callable[[int], Any]) -> list[float]:
    seed(1)
    numbers: list[float] = torch.rand(4, device="cuda").tolist()
    return numbers + torch.rand(4).tolist()


def seed_both_generators() -> None:
    assert draw_from(torch.manual_seed) == draw_from(torch.manual_seed)
    assert draw_from(torch.default_generator.manual_seed) != draw_from(torch.default_generator.manual_seed)


# With the number of waits. tests/launched/test_fake_cuda.py has collectives and autograd.
CORRECT: dict[str, tuple[Program, int]] = {
    "a CPU scalar": (lambda: on_gpu() * torch.tensor(2.0), 0),
    "a slice from the CPU": (lambda: on_gpu()[:2].copy_(torch.ones(2)), 1),
    "a copy that was waited for": (
        lambda: [copied := copy_to_cpu(), torch.cuda.current_stream().synchronize(), copied.numpy()],
        1,
    ),
    "streams that wait": (use_streams, 0),
    "a copy from pinned memory": (lambda: (on_gpu(), torch.ones(SIZE).pin_memory().to("cuda", non_blocking=True)), 0),
    "random numbers": (seed_both_generators, 4),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, dict[str, Any]]]:
    """What each program did, by rank."""
    require_fake_gpus()
    folder = tmp_path_factory.mktemp("rules")
    path = os.pathsep.join(map(str, (PROJECT, PROJECT / "tests")))
    with Job(str(ON_FAKE_GPUS), __file__, cwd=folder, RESULTS=str(folder), PYTHONPATH=path) as job:
        done = job.finish()
    assert done.status == 0, done.err
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", WITHOUT_GROUP | ERRORS | RACES | WAITS | CORRECT)
def test_a_defect_is_found_and_a_correct_program_is_accepted(results, name):
    for rank in results:
        error, races, waits, line = (rank[name][key] for key in ("error", "races", "waits", "line"))
        if name in WITHOUT_GROUP | ERRORS:
            assert (WITHOUT_GROUP | ERRORS)[name][1] in str(error)
            continue
        assert error is None
        if name in RACES:
            assert any(RACES[name][1] in race for race in races), races
            continue
        assert races == {}
        if name in WAITS:
            assert waits == {f"{WAITS[name][1]} at fake_cuda/test_rules.py:{line}": 1}
        else:
            assert sum(waits.values()) == CORRECT[name][1], waits


def run(program: Program) -> dict[str, Any]:
    """Run a program. Return what it raised, and the report."""
    torch.cuda.synchronize()
    torch.cuda.set_device(RANK)
    REPORT.clear()
    error = None
    try:
        program()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"error": error, "line": program.__code__.co_firstlineno} | copy.deepcopy(vars(REPORT))


if __name__ == "__main__":
    found = {name: run(program) for name, (program, _) in WITHOUT_GROUP.items()}
    initialize(device_id=torch.device("cuda", RANK))
    found |= {name: run(program) for name, (program, _) in (ERRORS | WAITS | RACES | CORRECT).items()}
    (Path(os.environ["RESULTS"]) / f"{RANK}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
