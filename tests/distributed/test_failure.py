"""A failure is classified as lost contact with other ranks, or as a cause on this rank, and one rank prints a line."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from helpers.worlds import fake_world
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, ProcessGroupGloo
from transformers import BertConfig, BertModel

from app.distributed import failure
from app.distributed.collectives import wait_for_device
from app.distributed.failure import is_lost_contact

GLOO = "/__w/pytorch/pytorch/third_party/gloo/gloo"
LOST = RuntimeError("Application timeout caused pair closure")


# ---- lost contact ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "problem",
    [
        LOST,
        RuntimeError(f"[{GLOO}/transport/tcp/pair.cc:537] Read error [::1]:51910: Connection reset by peer. Check"),
        RuntimeError(f"[../{GLOO[5:]}/transport/tcp/pair.cc:144] writev [::1]:5: Broken pipe"),
        RuntimeError(f"Gloo connectFullMesh failed with [{GLOO}/transport/tcp/pair.cc:144] timed out connecting: 1"),
        RuntimeError("NCCL Error 2: unhandled system error (run with NCCL_DEBUG=INFO for details)"),
        RuntimeError("NCCL communicator was aborted on rank 1."),
        dist.DistBackendError("NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network error"),
        dist.DistStoreError("wait timeout after 3000ms, keys: /failure/1"),
    ],
)
def test_errors_of_gloo_nccl_and_the_store_are_lost_contact(problem):
    assert is_lost_contact(problem)


@pytest.mark.parametrize("peer", ["silent", "gone"])
def test_a_peer_that_does_not_answer_is_lost_contact_in_the_installed_gloo(peer):
    store, timeout = HashStore(), timedelta(milliseconds=300)
    with ThreadPoolExecutor(2) as pool:
        pair = list(pool.map(lambda rank: ProcessGroupGloo(store, rank, 2, timeout), range(2)))
    if peer == "gone":
        pair.pop()
    for _ in range(2):  # what comes after a timeout has another text
        with pytest.raises(RuntimeError) as lost:
            pair[0].allreduce([torch.ones(1)]).wait()
        assert is_lost_contact(lost.value)


WORDS = ("gloo", "igloo", "nccl", "NCCL Error", "connection closed", "connection reset", "pair closure", "pair.cc:5")
PATHS = st.lists(st.sampled_from([*WORDS, "reviews", ".."]) | st.text(max_size=5), min_size=1, max_size=5).map("/".join)
MESSAGES = ("{}: no such file", "{}", "/{}", "[Errno 2] No such file: '{}'", "<{}> is bad", "[{}] is bad")


@given(PATHS, st.sampled_from([RuntimeError, ValueError, KeyError]), st.sampled_from(MESSAGES))
def test_a_path_with_such_words_and_an_os_error_are_not_lost_contact(path, kind, message):
    assert not is_lost_contact(kind(message.format("./" + path)))
    assert not is_lost_contact(ConnectionResetError(2, "Connection reset by peer", path))
    assert not is_lost_contact(OSError(f"[{GLOO}/transport/tcp/pair.cc:537] {path}"))


# ---- which rank prints what -----------------------------------------------------------------------------------------


@pytest.fixture
def printed(monkeypatch, capfd):
    """A function that returns the lines of ranks on standard error, each of which fails with its problem."""
    monkeypatch.setattr(failure, "exit_now", sys.exit)
    monkeypatch.setattr(failure.signal, "signal", lambda *_: None)

    def fail(*problems: Exception | None) -> list[str]:
        store = HashStore()
        for rank, problem in enumerate(problems):
            if problem is not None:  # None: the rank was killed
                with pytest.raises(SystemExit, match="1"):
                    failure.report_failure(problem, replace(fake_world(rank, len(problems)), store=store))
        return capfd.readouterr().err.splitlines()

    return fail


@pytest.fixture
def raised_by_bert(monkeypatch):
    """A function that returns what a BERT raises for a token that it lacks, or what `embed` raises in its place."""

    def fail(embed=torch.nn.Embedding.forward) -> Exception:
        monkeypatch.setattr(torch.nn.Embedding, "forward", embed)
        model = BertModel(BertConfig(num_hidden_layers=1, hidden_size=12, vocab_size=9))
        with pytest.raises(Exception, match=r".") as caught:
            model(input_ids=torch.tensor([[9]]))
        return caught.value

    return fail


def test_a_limit_of_the_model_is_one_line_of_the_first_rank_that_knows_it(printed, raised_by_bert):
    line = "error: rank 0 failed outside of training: index out of range in self"
    assert printed(raised_by_bert(), raised_by_bert(), LOST) == [line]


def test_too_little_gpu_memory_is_not_called_a_failure_of_the_model(printed, raised_by_bert):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    (line,) = printed(raised_by_bert(Mock(side_effect=error)))
    assert "try more --gradient_accumulation_steps" in line
    assert line.endswith(f": {error}")


def test_a_defect_of_this_program_inside_a_model_keeps_its_traceback(printed, raised_by_bert):
    problem = raised_by_bert(lambda *_: wait_for_device(None))  # any function of the program
    lines = printed(problem)
    assert lines[0].startswith("Traceback ")
    assert any("modeling_bert" in line for line in lines)
    assert lines[-1].startswith("error: rank 0 failed outside of training: 'NoneType' object has no attribute")


def test_without_a_cause_the_lowest_surviving_rank_names_those_that_do_not_answer(printed, monkeypatch):
    monkeypatch.setattr(failure, "ANSWER_SECONDS", 0.2)
    assert printed(LOST, LOST, None) == ["error: rank 0 lost contact with rank(s) 1, 2, outside of training"]
