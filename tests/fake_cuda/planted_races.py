"""Accesses without an order, waits of the host, random numbers and memory: more functions for planted_defects.py."""

from __future__ import annotations

import numpy as np
import torch

from fake_cuda.planting import SIZE, on_gpu, planted

# ---- the host reads the device's memory ----------------------------------------------------------------------------


@planted
def numpy_of_a_gpu_tensor() -> None:
    on_gpu().numpy()


@planted
def array_of_a_gpu_tensor() -> None:
    np.asarray(on_gpu())


@planted
def dlpack_of_a_gpu_tensor() -> None:
    np.from_dlpack(on_gpu())


@planted
def sum_of_a_copy_that_is_not_there_yet() -> None:
    on_gpu().to("cpu", non_blocking=True).sum()


@planted
def numpy_of_a_copy_that_is_not_there_yet() -> None:
    on_gpu().to("cpu", non_blocking=True).numpy()


@planted
def list_of_a_copy_that_is_not_there_yet() -> None:
    on_gpu().to("cpu", non_blocking=True).tolist()


@planted
def copy_that_was_waited_for() -> None:
    copy = on_gpu().to("cpu", non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert copy.numpy().sum() == SIZE


@planted
def batch_overwritten_while_it_is_copied() -> None:
    batch = torch.ones(SIZE).pin_memory()
    batch.to("cuda", non_blocking=True)
    batch.zero_()


# ---- streams -------------------------------------------------------------------------------------------------------


@planted
def stream_that_does_not_wait() -> None:
    tensor, side = on_gpu(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensor.mul_(2)


@planted
def result_of_a_stream_that_was_not_waited_for() -> None:
    tensor, side = on_gpu(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tensor.mul_(2)
    tensor.sum()


@planted
def memory_reused_while_a_stream_reads_it() -> None:
    tensor, side = on_gpu(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tensor.sum()
    del tensor
    torch.zeros(SIZE, device="cuda")  # the allocator gives it the same memory


@planted
def streams_that_wait() -> None:
    tensor, side = on_gpu(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = tensor.sum()
    tensor.record_stream(side)
    del tensor
    torch.zeros(SIZE, device="cuda")
    event = side.record_event()
    torch.cuda.current_stream().wait_event(event)
    assert (total / 2).item() == SIZE / 2


@planted
def gradients_on_the_stream_of_the_forward_pass() -> None:  # autograd itself waits between streams
    weight, side = torch.ones(SIZE, device="cuda", requires_grad=True), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = (weight * 2).sum()
    torch.cuda.current_stream().wait_stream(side)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.sum().item() == 2 * SIZE


# ---- waits of the host ---------------------------------------------------------------------------------------------


@planted
def wait_of_item() -> None:
    on_gpu().sum().item()


@planted
def wait_of_if() -> None:
    if on_gpu().all():
        pass


@planted
def wait_of_cpu() -> None:
    on_gpu().cpu()


@planted
def wait_of_tolist() -> None:
    on_gpu().tolist()


@planted
def wait_of_nonzero() -> None:
    on_gpu().nonzero()


@planted
def wait_of_a_boolean_index() -> None:
    tensor = on_gpu()
    tensor[tensor > 0]


@planted
def wait_of_a_copy_from_pageable_memory() -> None:
    on_gpu()
    torch.ones(SIZE).to("cuda", non_blocking=True)


@planted
def wait_of_a_query() -> None:
    on_gpu()
    event = torch.cuda.Event()
    event.record()
    while not event.query():
        pass


@planted
def wait_of_synchronize() -> None:
    on_gpu()
    torch.cuda.synchronize()


@planted
def second_read_of_the_same_result() -> None:
    total = on_gpu().sum()
    total.item()
    total.item()


@planted
def copy_from_pinned_memory() -> None:
    on_gpu()
    torch.ones(SIZE).pin_memory().to("cuda", non_blocking=True)


# ---- random numbers and memory -------------------------------------------------------------------------------------


@planted
def only_the_cpu_is_seeded() -> None:
    def draw() -> list[float]:
        torch.default_generator.manual_seed(1)
        numbers: list[float] = torch.rand(4, device="cuda").tolist()
        return numbers

    assert draw() == draw(), "other random numbers"


@planted
def both_are_seeded() -> None:
    def draw() -> list[float]:
        torch.manual_seed(1)
        numbers: list[float] = torch.rand(4, device="cuda").tolist()
        return numbers + torch.rand(4).tolist()

    assert draw() == draw(), "other random numbers"


@planted
def ten_tensors_of_one_mebibyte() -> None:
    before = torch.cuda.memory_allocated()
    tensors = [torch.ones(2**18, device="cuda") for _ in range(10)]
    assert torch.cuda.memory_allocated() == before + 10 * 2**20
    del tensors
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() >= before + 10 * 2**20
