"""What a resumed run takes over from the run so far."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.worlds import fake_world

from app.checkpoint.resume import Resume
from app.common.errors import UserError
from app.data.sampler import plan_batches
from app.settings import Settings
from app.training import prepare as prepare_module
from app.training.prepare import restore_settings


@pytest.fixture
def two_threads():
    """This process works with 2 threads, and gets back the number that it has had."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def all_with_two_threads(two_threads, monkeypatch):
    """All ranks start with 2 threads, except for one with 5."""
    monkeypatch.setattr(prepare_module, "all_gather_object", lambda mine, world: [5, *[mine] * world.size])


def recorded(**changes: Any) -> Resume:
    """A run on 2 ranks with 3 threads each."""
    return Resume(recorded={"logical_ranks": 2, "threads": 3, "train_batch_size": 32} | changes)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_a_new_run_has_one_logical_rank_per_process(all_with_two_threads, ranks):
    settings = Settings(train_batch_size=48)
    adopted = restore_settings(settings, Resume(), fake_world(0, ranks))
    assert adopted.as_dict() == settings.as_dict() | {"logical_ranks": ranks}
    assert torch.get_num_threads() == 2
    assert plan_batches(adopted, 1_000, ranks) == plan_batches(settings, 1_000, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("logical_ranks", [1, 2, 8])
def test_a_resumed_run_keeps_its_logical_ranks_and_threads(all_with_two_threads, ranks, logical_ranks):
    settings = Settings(train_batch_size=48)
    adopted = restore_settings(settings, recorded(logical_ranks=logical_ranks), fake_world(0, ranks))
    assert adopted.as_dict() == settings.as_dict() | {"logical_ranks": logical_ranks}
    assert torch.get_num_threads() == 3


def test_a_run_on_3_ranks_can_be_resumed_on_3_ranks(all_with_two_threads):
    settings = Settings(train_batch_size=48)
    adopted = restore_settings(settings, recorded(logical_ranks=3), fake_world(0, 3))
    assert plan_batches(adopted, 1_000, 3).logical_ranks == 3
    resumed = restore_settings(settings, recorded(logical_ranks=3), fake_world())
    with pytest.raises(UserError, match=r"--logical_ranks 3 .*cannot be divided among 1 rank.*: start 3 rank"):
        plan_batches(resumed, 1_000, 1)


def test_requested_logical_ranks_and_threads_are_kept(all_with_two_threads):
    adopted = restore_settings(Settings(logical_ranks=8, threads=2), recorded(), fake_world(0, 2))
    assert (adopted.logical_ranks, adopted.threads) == (8, 2)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_batch_size_per_rank_keeps_the_global_one_if_the_number_of_ranks_changes(all_with_two_threads, ranks):
    """It was 16 rows on each of 2 ranks."""
    before = recorded(per_device_train_batch_size=16, logical_ranks=4)
    adopted = restore_settings(Settings(per_device_train_batch_size=16), before, fake_world(0, ranks))
    plan = plan_batches(adopted, 1_000, ranks)
    assert (plan.global_size, plan.logical_ranks, plan.micro_size) == (32, 4, 8)


def test_another_batch_size_per_rank_is_used_as_given(all_with_two_threads):
    before = recorded(per_device_train_batch_size=16)
    adopted = restore_settings(Settings(per_device_train_batch_size=32), before, fake_world())
    assert plan_batches(adopted, 1_000, 1).global_size == 32, "the same global batch on half as many ranks"
    adopted = restore_settings(Settings(train_batch_size=64), before, fake_world())
    assert plan_batches(adopted, 1_000, 1).global_size == 64
    adopted = restore_settings(Settings(per_device_train_batch_size=16), recorded(), fake_world())
    assert plan_batches(adopted, 1_000, 1).global_size == 16, "the run so far was given a global batch size"
