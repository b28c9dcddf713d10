"""The ranks of an attempt find each other, whatever earlier attempts left in the store."""

from __future__ import annotations

import threading
import uuid
from datetime import timedelta

import pytest
from helpers.marks import slow_after
from torch.distributed import HashStore, TCPStore

from app.common.errors import RunError
from app.distributed.rendezvous import per_attempt_store

TIMEOUT = timedelta(seconds=20)


@pytest.fixture(params=["hash", "tcp"])
def connect(request):
    """A function that gives a thread its own connection to one store."""
    if request.param == "hash":
        shared = HashStore()
        yield lambda: shared
    else:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield lambda: TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)


def connect_ranks(connect, size, delays=None, ranks=None):
    """Run each rank in its own thread and return the stores by rank."""
    found, errors = {}, {}

    def run(rank):
        try:
            threading.Event().wait((delays or {}).get(rank, 0))
            found[rank] = per_attempt_store(connect(), rank=rank, size=size, timeout=TIMEOUT)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in (ranks or range(size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "hangs"
    assert not errors
    return found


def assert_shared(stores):
    """All ranks see each other's keys."""
    token = uuid.uuid4().hex
    stores[0].set("word", token)
    assert {store.get("word").decode() for store in stores.values()} == {token}


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_get_the_same_store(connect, size):
    stores = connect_ranks(connect, size)
    assert set(stores) == set(range(size))
    assert_shared(stores)


@pytest.mark.parametrize("late", slow_after(1, [0, 1, 2]))
def test_handshakes_of_dead_ranks_are_ignored(connect, late):
    """The previous attempt left tokens of all ranks, answered or not; one new rank arrives late."""
    first = connect_ranks(connect, 3)
    first[0].set("address", "of a dead rank")
    dead = connect()
    for rank in (1, 2):
        dead.set(f"handshake/{rank}", uuid.uuid4().hex)  # published by a rank that died before it was answered
    second = connect_ranks(connect, 3, delays={late: 1.3})
    assert_shared(second)
    assert not second[1].check(["address"]), "the new attempt reads what the previous one left"


@pytest.mark.slow
def test_ten_attempts_in_a_row(connect):
    for number in range(10):
        stores = connect_ranks(connect, 3)
        assert not stores[2].check(["seen"])
        stores[0].set("seen", str(number))


def test_a_rank_that_dies_between_answer_and_confirmation(connect):
    """Rank 1 publishes a token and dies after rank 0 has answered; its successor arrives while rank 0 waits."""
    connect().set("handshake/1", "token of a dead rank")
    assert_shared(connect_ranks(connect, 2, delays={1: 0.5}))


@pytest.mark.parametrize("present", [0, 1])
def test_a_missing_rank_is_named_without_further_lines(connect, present, capfd):
    with pytest.raises(RunError, match=f"rank {1 - present} did not"):
        per_attempt_store(connect(), rank=present, size=2, timeout=timedelta(seconds=1))
    assert capfd.readouterr().err == "", "PyTorch's C++ code warns when a wait for a key times out"


@pytest.mark.parametrize("late", slow_after(1, [1, 0, 2]))
def test_ranks_that_arrive_at_different_times_print_nothing(connect, late, capfd):
    assert_shared(connect_ranks(connect, 3, delays={late: 1.3}))
    assert capfd.readouterr().err == ""
