"""Fake GPUs: each rule catches a planted defect, and accepts correct programs. One job of two ranks runs them all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.jobs import ON_FAKE_GPUS, PROJECT, Job, require_fake_gpus

pytestmark = [pytest.mark.launched, pytest.mark.slow]

ERRORS = {
    "group_of_another_device": "but the current device is cuda:",
    "device_that_does_not_exist": "invalid device ordinal: 2 of 2",
    "tensors_on_two_gpus": "Expected all tensors to be on the same device, but found cuda:",
    "tensors_on_gpu_and_cpu": "Expected all tensors to be on the same device, but found cuda:",
    "matrix_product_with_the_cpu": "Expected all tensors to be on the same device, but found cuda:",
    "cpu_scalar_for_a_list_of_tensors": "Expected all tensors to be on the same device, but found cuda:",
    "stack_with_a_cpu_scalar": "Expected all tensors to be on the same device, but found cuda:",
    "pinned_gpu_memory": "only CPU tensors can be pinned",
    "nccl_with_a_cpu_tensor": "No backend type associated with device type cpu",
    "nccl_with_another_gpus_tensor": "but this rank's GPU is cuda:",
    "nccl_with_gaps": "Tensors must be contiguous",
    "nccl_with_a_type_that_it_lacks": "NCCL has no torch.int16",
    "gloo_with_a_gpu_tensor": "a CUDA tensor in a gloo group",
    "numpy_of_a_gpu_tensor": "device type tensor to numpy",
    "array_of_a_gpu_tensor": "device type tensor to numpy",
    "dlpack_of_a_gpu_tensor": "device type tensor to numpy",
    "only_the_cpu_is_seeded": "other random numbers",
}
RACES = {
    "result_of_a_collective_before_it_is_there": "before: nccl allreduce_",
    "sum_of_a_copy_that_is_not_there_yet": "the host reads without waiting",
    "numpy_of_a_copy_that_is_not_there_yet": "the host reads without waiting",
    "list_of_a_copy_that_is_not_there_yet": "the host reads without waiting",
    "batch_overwritten_while_it_is_copied": "the host writes without waiting",
    "stream_that_does_not_wait": "without waiting for stream 0: mul_",
    "result_of_a_stream_that_was_not_waited_for": "stream 0 reads without waiting",
    "memory_reused_while_a_stream_reads_it": "before: sum",
}
WAITS = {
    "wait_of_item": "item()",
    "wait_of_if": "item()",
    "wait_of_cpu": "copy to the host",
    "wait_of_tolist": "tolist()",
    "wait_of_nonzero": "nonzero",
    "wait_of_a_boolean_index": "index",
    "wait_of_a_copy_from_pageable_memory": "copy to the device, from pageable memory",
    "wait_of_a_query": "Event.query()",
    "wait_of_synchronize": "torch.cuda.synchronize()",
    "second_read_of_the_same_result": "item()",  # it waits once
}
NOTES = {
    "group_without_device_id": "init_process_group('nccl') without device_id",
    "cpu_scalar": "a CPU scalar with CUDA tensors",
}
CORRECT = (
    *("group_of_this_device", "assignment_of_a_slice_from_the_cpu", "correct_collectives", "copy_that_was_waited_for"),
    *("streams_that_wait", "gradients_on_the_stream_of_the_forward_pass", "copy_from_pinned_memory"),
    *("both_are_seeded", "ten_tensors_of_one_mebibyte"),
)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, dict[str, Any]]]:
    """What each function of planted_defects.py did, by rank."""
    require_fake_gpus()
    folder = tmp_path_factory.mktemp("defects")
    script = str(Path(__file__).with_name("planted_defects.py"))
    with Job(str(ON_FAKE_GPUS), script, cwd=folder, DEFECTS=str(folder), PYTHONPATH=str(PROJECT / "tests")) as job:
        done = job.finish()
    assert done.status == 0, done.err
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_every_planted_defect_is_expected_here(results):
    assert {*ERRORS, *RACES, *WAITS, *NOTES, *CORRECT} == set(results[0])


@pytest.mark.parametrize("defect", ERRORS)
def test_an_operation_that_a_gpu_rejects_is_an_error(results, defect):
    for rank in results:
        assert ERRORS[defect] in str(rank[defect]["error"])


@pytest.mark.parametrize("defect", RACES)
def test_accesses_without_an_order_are_a_race(results, defect):
    for rank in results:
        assert rank[defect]["error"] is None
        assert any(RACES[defect] in race for race in rank[defect]["races"]), rank[defect]


@pytest.mark.parametrize("defect", WAITS)
def test_a_wait_of_the_host_is_counted_with_its_line(results, defect):
    for rank in results:
        found = rank[defect]
        assert found["error"] is None
        assert list(found["waits"].values()) == [1], found["waits"]
        (wait,) = found["waits"]
        assert wait.startswith(f"{WAITS[defect]} at fake_cuda/planted_races.py:")
        assert 0 < int(wait.split(":")[-1]) - found["line"] < 8


@pytest.mark.parametrize("defect", NOTES)
def test_each_note_is_reported(results, defect):
    for rank in results:
        assert rank[defect]["error"] is None
        assert any(NOTES[defect] in note for note in rank[defect]["notes"])


@pytest.mark.parametrize("program", CORRECT)
def test_a_correct_program_has_neither_errors_nor_races(results, program):
    for rank in results:
        assert rank[program]["error"] is None
        assert rank[program]["races"] == {}


@pytest.mark.parametrize("program", [name for name in (*CORRECT, *NOTES) if "collectives" not in name])
def test_a_program_that_reads_no_result_does_not_wait(results, program):
    reads = {"copy_that_was_waited_for": 1, "streams_that_wait": 1, "gradients_on_the_stream_of_the_forward_pass": 1}
    seeded = {"both_are_seeded": 2, "assignment_of_a_slice_from_the_cpu": 1}  # pageable memory
    for rank in results:
        assert sum(rank[program]["waits"].values()) == (reads | seeded).get(program, 0), rank[program]["waits"]
