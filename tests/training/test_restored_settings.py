"""What a resumed run takes over from the run so far."""

from __future__ import annotations

import pytest
import torch
from helpers.worlds import fake_world

from app.checkpoint.resume import Resume
from app.data.batches import plan_batches
from app.settings import Settings
from app.training import prepare
from app.training.prepare import restore_settings

RECORDED = {"logical_ranks": 2, "threads": 3, "train_batch_size": 32}  # a run on 2 ranks
PER_DEVICE_16 = {"per_device_train_batch_size": 16}
PER_DEVICE = RECORDED | PER_DEVICE_16 | {"logical_ranks": 4}
# The settings, those of the run so far, the number of ranks; the global batch, its logical ranks, threads per rank.
CASES = {
    "a new run has one logical rank per process": ({"train_batch_size": 48}, {}, 3, (48, 3, 2)),
    "a resumed run keeps those of the run so far": ({"train_batch_size": 48}, RECORDED, 1, (48, 2, 3)),
    "requested ones are kept": ({"logical_ranks": 8, "threads": 2}, RECORDED, 2, (32, 8, 2)),
    "the same batch per rank is the same global batch": (PER_DEVICE_16, PER_DEVICE, 1, (32, 4, 3)),
    "another one is used as given": ({"per_device_train_batch_size": 64}, PER_DEVICE, 1, (64, 4, 3)),
    "the run so far was given a global batch": (PER_DEVICE_16, RECORDED, 1, (16, 2, 3)),
}


@pytest.mark.parametrize(("requested", "before", "ranks", "expected"), CASES.values(), ids=CASES)
def test_a_run_has_the_batches_and_threads_of_the_run_so_far(monkeypatch, requested, before, ranks, expected):
    # All ranks start with 2 threads, except for one with 5.
    monkeypatch.setattr(prepare, "all_gather_object", lambda mine, world: [5, *[mine] * world.size])
    torch.set_num_threads(2)
    settings = restore_settings(Settings(**requested), Resume(recorded=before), fake_world(0, ranks))
    plan = plan_batches(settings, 1_000, ranks)
    assert (plan.global_size, plan.logical_ranks, torch.get_num_threads()) == expected
    adopted = {"logical_ranks", "train_batch_size", "per_device_train_batch_size"}
    unchanged = settings.as_dict().items() - Settings(**requested).as_dict().items()
    assert {name for name, _ in unchanged} <= adopted
