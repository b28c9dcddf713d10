"""The model of a training step, against steps that were computed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.bench.alpha_beta import AlphaBeta
from app.bench.scaling.predict import (
    Computation,
    Cores,
    Network,
    local_network,
    one_after_another,
    predict_step,
    two_nodes,
)
from app.common.link import Link

# Forward 1 s, backward 2 s with buckets after 1 and 2 s, update 0.5 s.
COMPUTATION = Computation(3.5, ((100, 2.0), (200, 3.0)))
IDLE = Cores(cores=8, ranks=2)  # the exchanges take no time from the computation


def line(alpha: float, beta: float) -> AlphaBeta:
    return AlphaBeta(alpha, beta, 0.0, 0.0, 0.0, 0.0, 0.0, 5)


def exchanges(seconds: float, cpu_seconds: float = 0.0) -> Network:
    """A network whose exchanges all take the same time."""
    return Network(one_after_another(lambda size: seconds), lambda size: cpu_seconds)


@pytest.mark.parametrize(
    ("seconds", "step", "why"),
    [
        (0.0, 3.5, "nothing to wait for"),
        (0.5, 4.0, "the first bucket is hidden behind the backward pass, the last one never is"),
        (1.0, 4.5, "the first one ends right when the second is ready"),
        (2.0, 6.5, "the second one waits for the first, until 4 s, and ends at 6 s"),
    ],
)
def test_only_what_is_exchanged_after_the_backward_pass_is_exposed(seconds, step, why):
    assert predict_step(COMPUTATION, exchanges(seconds), IDLE) == pytest.approx(step), why


def test_ranks_that_share_cores_compute_more_slowly():
    assert Cores(cores=2, ranks=1).slowdown == 1
    assert Cores(cores=2, ranks=2).slowdown == 1
    assert Cores(cores=2, ranks=8).slowdown == 4
    assert Cores(cores=4, ranks=2, threads=4).slowdown == 2
    step = predict_step(COMPUTATION, exchanges(0.0), Cores(cores=2, ranks=4))
    assert step == pytest.approx(2 * 3.5)


def test_where_no_core_is_idle_a_hidden_exchange_delays_the_computation():
    network = exchanges(0.5, cpu_seconds=0.25)
    assert Cores(cores=2, ranks=2).displaced == 1
    assert predict_step(COMPUTATION, network, Cores(cores=2, ranks=2)) == pytest.approx(3.0 + 0.25 + 0.5 + 0.5)
    assert Cores(cores=4, ranks=2).displaced == 0
    assert predict_step(COMPUTATION, network, Cores(cores=4, ranks=2)) == pytest.approx(3.0 + 0.5 + 0.5)
    assert Cores(cores=3, ranks=2).displaced == pytest.approx(0.5)


def test_local_exchanges_grow_with_the_ranks_as_a_ring_does():
    """N ranks send 2 (N - 1) / N of the tensor in 2 (N - 1) messages, and share the cores."""

    def seconds(ranks: int) -> float:
        network = local_network(line(0.1, 0.01), line(0.0, 0.0), Cores(cores=2, ranks=ranks))
        return network.finish([0.0], [100])[0]

    assert seconds(2) == pytest.approx(0.1 + 1.0), "as measured"
    assert seconds(4) == pytest.approx(2 * (3 * 0.1 + 1.5))
    assert seconds(8) == pytest.approx(4 * (7 * 0.1 + 1.75))


def test_a_small_bucket_takes_four_delays_between_two_nodes():
    network = two_nodes(Link(delay_ms=250), line(0.0, 0.0), line(0.0, 0.0))
    single = Computation(3.5, ((4, 3.0),))
    assert predict_step(single, network, IDLE) == pytest.approx(3.0 + 4 * 0.25 + 0.5)


buckets = st.lists(st.tuples(st.integers(1, 10**8), st.floats(0.001, 1)), min_size=1, max_size=6)


@given(
    buckets=buckets, update=st.floats(0, 1), beta=st.floats(0, 1e-7), factor=st.floats(1, 5), ranks=st.integers(1, 64)
)
def test_a_slower_network_or_more_ranks_never_shorten_a_step(buckets, update, beta, factor, ranks):
    times = sorted(at for _, at in buckets)
    computation = Computation(
        times[-1] + update, tuple((size, at) for (size, _), at in zip(buckets, times, strict=True))
    )

    def step(beta: float, ranks: int) -> float:
        cores = Cores(cores=4, ranks=ranks)
        return predict_step(computation, local_network(line(1e-4, beta), line(1e-4, beta), cores), cores)

    base = step(beta, ranks)
    assert base >= computation.seconds * Cores(4, ranks).slowdown * 0.999
    assert step(beta * factor, ranks) >= base * 0.999
    assert step(beta, ranks + 1) >= base * 0.999
