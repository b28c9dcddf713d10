"""A failure is classified as lost contact with other ranks, or as a cause on this rank."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, ProcessGroupGloo
from transformers import BertConfig, BertModel, HeliumConfig, HeliumForSequenceClassification

from app.common.errors import raised_by_model
from app.distributed import failure
from app.distributed.collectives import wait_for_device
from app.distributed.failure import is_lost_contact
from app.distributed.world import Topology, World
from app.plan.empty_model import SuppliedResults

GLOO = "/__w/pytorch/pytorch/third_party/gloo/gloo"
HINT = "This is typically caused by a remote worker crashing. Check the logs of the remote worker. GLHF!"


@pytest.mark.parametrize(
    "problem",
    [
        RuntimeError(f"[{GLOO}/transport/tcp/pair.cc:537] Read error [::1]:51910: Connection reset by peer. {HINT}"),
        RuntimeError(f"[{GLOO}/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:33415. {HINT}"),
        RuntimeError(f"[{GLOO}/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation"),
        RuntimeError(f"[../{GLOO[5:]}/transport/tcp/pair.cc:144] writev [::1]:5: Broken pipe"),
        RuntimeError(f"Gloo connectFullMesh failed with [{GLOO}/transport/tcp/pair.cc:144] timed out connecting: 1"),
        RuntimeError("Application timeout caused pair closure"),
        RuntimeError("NCCL Error 2: unhandled system error (run with NCCL_DEBUG=INFO for details)"),
        RuntimeError("NCCL communicator was aborted on rank 1."),
        dist.DistBackendError("NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network error"),
        dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."),
        dist.DistStoreError("wait timeout after 3000ms, keys: /failure/1"),
    ],
)
def test_errors_of_gloo_nccl_and_the_store_are_lost_contact(problem):
    assert is_lost_contact(problem)


@pytest.fixture
def pair() -> Iterator[list[ProcessGroupGloo]]:
    """Both ranks of a gloo group, in one process."""
    store, groups = HashStore(), [None, None]

    def connect(rank: int) -> None:
        groups[rank] = ProcessGroupGloo(store, rank, 2, timedelta(milliseconds=300))

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield groups  # type: ignore[misc]
    groups.clear()


def test_a_timeout_of_the_installed_gloo_is_lost_contact(pair):
    with pytest.raises(RuntimeError) as late:
        pair[0].allreduce([torch.ones(1)]).wait()
    assert "Timed out" in str(late.value)
    with pytest.raises(RuntimeError) as later:
        pair[0].allreduce([torch.ones(1)]).wait()
    assert is_lost_contact(late.value)
    assert is_lost_contact(later.value)


def test_a_peer_that_left_is_lost_contact_in_the_installed_gloo(pair):
    pair.pop()
    with pytest.raises(RuntimeError) as left:
        pair[0].allreduce([torch.ones(1)]).wait()
    assert is_lost_contact(left.value)


WORDS = ("gloo", "igloo", "nccl", "NCCL Error", "connection closed", "connection reset", "pair closure", "pair.cc:5")
PATHS = st.lists(st.sampled_from([*WORDS, "reviews", ".."]) | st.text(max_size=5), min_size=1, max_size=5).map("/".join)


@given(PATHS, st.sampled_from([FileNotFoundError, PermissionError, ConnectionResetError, OSError]))
def test_no_os_error_is_lost_contact(path, kind):
    assert not is_lost_contact(kind(2, "Connection reset by peer", path))
    assert not is_lost_contact(kind(f"[{GLOO}/transport/tcp/pair.cc:537] {path}"))


@given(
    PATHS,
    st.sampled_from([RuntimeError, ValueError, KeyError]),
    st.sampled_from(["{}: no such file", "{}", "/{}", "[Errno 2] No such file: '{}'", "<{}> is bad", "[{}] is bad"]),
)
def test_a_path_that_contains_such_words_is_not_lost_contact(path, kind, message):
    text = message.format("./" + path)
    assert not is_lost_contact(kind(text))


def lines_of(problems, monkeypatch, capfd) -> list[str]:
    """What the ranks print on standard error, each of which fails with its problem."""
    store = HashStore()
    monkeypatch.setattr(failure, "exit_now", sys.exit)
    monkeypatch.setattr(failure.signal, "signal", lambda *_: None)
    for rank, problem in enumerate(problems):
        if problem is None:
            continue
        size = len(problems)
        world = World(rank, size, rank, size, torch.device("cpu"), store, timedelta(seconds=5), Topology(size, size))
        with pytest.raises(SystemExit, match="1"):
            failure.report_failure(problem, world)
    return capfd.readouterr().err.splitlines()


def failing_helium() -> torch.nn.Module:
    """A classifier whose code fails in its forward pass."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 9}
    config = HeliumConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, head_dim=32, pad_token_id=0)
    return HeliumForSequenceClassification(config)


def test_a_limit_of_the_model_is_one_line_of_one_rank(monkeypatch, capfd):
    model, problems = failing_helium(), []
    for length in (3, 4):
        with pytest.raises(RuntimeError) as caught:
            model(input_ids=torch.ones(1, length, dtype=torch.int64))
        problems.append(caught.value)
    (line,) = lines_of(problems, monkeypatch, capfd)
    assert line.startswith("error: rank 0 failed outside of training: mat1 and mat2 shapes")


def test_too_little_gpu_memory_is_not_called_a_failure_of_the_model(monkeypatch, capfd):
    model, problems = BertModel(BertConfig(num_hidden_layers=1, hidden_size=12, vocab_size=9)), []
    for size in (2, 3):
        error = torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size}.00 GiB.")
        monkeypatch.setattr(torch.nn.Embedding, "forward", Mock(side_effect=error))
        with pytest.raises(torch.OutOfMemoryError) as caught:
            model(input_ids=torch.ones(1, 3, dtype=torch.int64))
        assert raised_by_model(caught.value)
        problems.append(caught.value)
    (line,) = lines_of(problems, monkeypatch, capfd)
    assert line.startswith("error: rank 0 failed outside of training: try more --gradient_accumulation_steps, ")
    assert line.endswith(": CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_defect_of_this_program_inside_a_model_keeps_its_traceback(monkeypatch, capfd):
    model = BertModel(BertConfig(num_hidden_layers=1, hidden_size=12, vocab_size=9))
    model.embeddings.register_forward_pre_hook(lambda *_: wait_for_device(None))  # any function of the program
    with pytest.raises(AttributeError) as caught:
        model(input_ids=torch.ones(1, 3, dtype=torch.int64))
    assert "transformers.models.bert.modeling_bert" in {
        frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(caught.value.__traceback__)
    }
    assert not raised_by_model(caught.value)
    lines = lines_of([caught.value], monkeypatch, capfd)
    assert lines[0].startswith("Traceback ")
    assert lines[-1].startswith("error: rank 0 failed outside of training: 'NoneType' object has no attribute")


def test_a_model_fails_by_itself_even_if_its_operations_are_intercepted():
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes") as caught, SuppliedResults():
        failing_helium()(input_ids=torch.ones(1, 3, dtype=torch.int64))
    assert raised_by_model(caught.value)


def test_only_the_first_rank_that_knows_a_cause_prints_it(monkeypatch, capfd):
    lost = RuntimeError("Application timeout caused pair closure")
    problems = [ValueError("one"), ValueError("two"), lost]
    errors = [line for line in lines_of(problems, monkeypatch, capfd) if line.startswith("error: ")]
    assert errors == ["error: rank 0 failed outside of training: one"]


def test_without_a_cause_the_lowest_surviving_rank_names_those_that_do_not_answer(monkeypatch, capfd):
    monkeypatch.setattr(failure, "ANSWER_SECONDS", 0.2)
    lost = RuntimeError("Application timeout caused pair closure")
    lines = lines_of([lost, lost, None], monkeypatch, capfd)  # None: the rank was killed
    assert lines == ["error: rank 0 lost contact with rank(s) 1, 2, outside of training"]
