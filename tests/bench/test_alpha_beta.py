"""The α-β fit recovers known lines, its intervals cover what they promise, and the costs agree with each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import binomtest

from app.bench.alpha_beta import (
    AlphaBeta,
    bus_bandwidth_factor,
    fit_alpha_beta,
    ring_all_gather,
    ring_all_reduce,
    tree_all_reduce,
)

SIZES = [4.0**exponent * 1024 for exponent in range(10)]  # 1 KiB to 256 MiB
alphas = st.floats(1e-6, 1e-2)
betas = st.floats(1e-12, 1e-7)
ranks_of = st.integers(2, 1024)


def line(alpha: float, beta: float) -> list[float]:
    return [alpha + beta * size for size in SIZES]


def noisy(alpha: float, beta: float, noise: float, generator: np.random.Generator) -> AlphaBeta:
    return fit_alpha_beta(SIZES, np.array(line(alpha, beta)) * (1 + noise * generator.standard_normal(len(SIZES))))


@given(alphas, betas)
def test_times_without_noise_are_recovered(alpha, beta):
    assume(beta * SIZES[-1] > 0.01 * alpha)  # otherwise β is below the rounding errors
    fit = fit_alpha_beta(SIZES, line(alpha, beta))
    assert fit.alpha == pytest.approx(alpha, rel=1e-6)
    assert fit.beta == pytest.approx(beta, rel=1e-6)
    assert fit.relative_error < 1e-9
    assert fit.scatter < 1e-6
    for size in SIZES:
        low, high = fit.prediction_interval(size)
        assert low <= fit.seconds(size) <= high
        assert high - low < 1e-4 * fit.seconds(size)


@given(alphas, betas, st.floats(0.001, 0.1), st.integers(0, 2**32))
def test_noise_moves_the_line_by_a_few_standard_errors(alpha, beta, noise, seed):
    assume(0.01 * beta * SIZES[-1] > alpha > 10 * beta * SIZES[0])
    fit = noisy(alpha, beta, noise, np.random.default_rng(seed))
    assert fit.alpha > 0
    assert fit.beta > 0
    # The true error, not the estimate, which can be much too small with eight degrees of freedom.
    assert fit.alpha == pytest.approx(alpha, rel=6 * noise)
    assert fit.beta == pytest.approx(beta, rel=6 * noise)


@pytest.mark.parametrize("noise", [0.02, 0.1])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_intervals_cover_as_often_as_they_promise(noise, confidence):
    alpha, beta, size, trials = 5e-5, 1e-9, 50_000, 600
    generator = np.random.default_rng(3)
    covered_at = dict.fromkeys((0, size), 0)
    for _ in range(trials):
        fit = noisy(alpha, beta, noise, generator)
        for n in covered_at:
            low, high = fit.prediction_interval(n, confidence)
            covered_at[n] += low <= (alpha + beta * n) * (1 + noise * generator.standard_normal()) <= high
    for covered in covered_at.values():
        interval = binomtest(covered, trials).proportion_ci(0.9999)
        assert interval.low <= confidence + 0.02
        assert interval.high >= confidence - 0.02, "the noise is not exactly that of the weights"


@given(st.lists(st.floats(1e-7, 10), min_size=len(SIZES), max_size=len(SIZES)))
def test_any_times_give_a_line_that_does_not_fall(times):
    fit = fit_alpha_beta(SIZES, times)
    assert fit.alpha >= 0
    assert fit.beta >= 0
    assert fit.alpha + fit.beta > 0
    assert fit.beta == 0 or fit.beta >= fit.beta_error > 0
    assert all(math.isfinite(value) for value in vars(fit).values())
    low, high = fit.prediction_interval(SIZES[0])
    assert 0 <= low <= high


def test_times_that_fall_with_the_size_have_no_bandwidth():
    fit = fit_alpha_beta([1, 2, 3], [3, 2, 1])
    assert fit.beta == 0
    assert fit.alpha > 0


@given(alphas, st.lists(st.sampled_from([-1, 0, 1]), min_size=len(SIZES), max_size=len(SIZES)))
def test_times_that_differ_by_rounding_have_no_bandwidth(alpha, roundings):
    """On some CPUs, β of equal times is 0, on others 1e-28 seconds per byte."""
    fit = fit_alpha_beta(SIZES, [math.nextafter(alpha, alpha + way) for way in roundings])
    assert fit.beta == 0
    assert fit.alpha == pytest.approx(alpha)


@given(alphas, st.integers(0, 2**32))
def test_a_bandwidth_that_noise_explains_is_none(alpha, seed):
    fit = noisy(alpha, 0.0, 0.05, np.random.default_rng(seed))
    assert fit.beta == 0 or fit.beta >= fit.beta_error > 0
    assert fit.alpha == pytest.approx(alpha, rel=0.5)


def test_a_delayed_point_has_little_influence():
    times = line(5e-5, 1e-9)
    times[3] *= 20
    fit = fit_alpha_beta(SIZES, times)
    assert fit.alpha == pytest.approx(5e-5, rel=0.1)
    assert fit.beta == pytest.approx(1e-9, rel=0.1)


@pytest.mark.parametrize(
    ("sizes", "times"),
    [
        ([1, 2], [1, 2]),
        ([1, 1, 1, 2], [1, 1, 1, 2]),
        ([1, 2, 3], [1, 2]),
        ([1, 2, 3], [1, 2, 0]),
        ([1, 2, -3], [1, 2, 3]),
        ([1, 2, 3], [1, math.nan, 3]),
        ([1, 2, math.inf], [1, 2, 3]),
    ],
)
def test_points_that_cannot_be_fitted_raise(sizes, times):
    with pytest.raises(ValueError, match="sizes"):
        fit_alpha_beta(sizes, times)


@given(ranks_of, st.integers(1, 2**30), alphas, betas)
def test_a_ring_sends_each_byte_twice_at_most(ranks, size, alpha, beta):
    assert ring_all_reduce(ranks, size, alpha=1, beta=0) == 2 * (ranks - 1)
    assert size <= ring_all_reduce(ranks, size, alpha=0, beta=1) < 2 * size
    assert ring_all_reduce(ranks, size, alpha=alpha, beta=beta) == pytest.approx(
        2 * (ranks - 1) * alpha + 2 * (ranks - 1) / ranks * size * beta
    )
    assert 2 * ring_all_gather(ranks, size, alpha=alpha, beta=beta) == ring_all_reduce(
        ranks, size, alpha=alpha, beta=beta
    )


@given(ranks_of, st.integers(1, 2**30), alphas, betas)
def test_bus_bandwidth_of_a_ring_without_latency_is_that_of_the_link(ranks, size, alpha, beta):
    seconds = ring_all_reduce(ranks, size, alpha=0, beta=beta)
    assert bus_bandwidth_factor("all-reduce", ranks) * size / seconds == pytest.approx(1 / beta)
    seconds = ring_all_gather(ranks, size, alpha=0, beta=beta)
    assert bus_bandwidth_factor("reduce-scatter", ranks) * size / seconds == pytest.approx(1 / beta)


@given(ranks_of, alphas, betas)
def test_a_tree_has_the_shorter_latency(ranks, alpha, beta):
    assert tree_all_reduce(ranks, 0, alpha=alpha, beta=beta) <= ring_all_reduce(ranks, 0, alpha=alpha, beta=beta)
    assert tree_all_reduce(2 * ranks, 0, alpha=alpha, beta=beta) == pytest.approx(
        tree_all_reduce(ranks, 0, alpha=alpha, beta=beta) + 2 * alpha
    )


def test_one_rank_sends_nothing():
    for cost in (ring_all_gather, ring_all_reduce, tree_all_reduce):
        assert cost(1, 1e6, alpha=1e-3, beta=1e-9) == 0
    for collective in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "gather", "scatter"):
        assert bus_bandwidth_factor(collective, 1) == 0


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("all-reduce", 1.75), ("all-gather", 0.875), ("all-to-all", 0.875), ("broadcast", 1), ("reduce", 1)],
)
def test_the_factors_are_those_of_nccl_tests(collective, factor):
    assert bus_bandwidth_factor(collective, 8) == factor


def test_an_unknown_collective_has_no_bus_bandwidth():
    with pytest.raises(ValueError, match="barrier"):
        bus_bandwidth_factor("barrier", 2)
