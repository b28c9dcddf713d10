"""The simulation of gloo's ring all-reduce, against times that were computed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.bench.scaling.gloo_ring import LARGEST_SEGMENT, WAKE_UP, segments_per_phase, simulate_ring
from app.common.link import Link

MIB = 2**20


def test_a_small_tensor_takes_four_delays():
    """Announcement and segment, in two phases; what is sent at the same time arrives at the same time."""
    (end,) = simulate_ring([0.0], [4], Link(delay_ms=5), software=0.0)
    assert end == pytest.approx(4 * 0.005)


def test_without_delay_the_rate_alone_determines_the_time():
    (end,) = simulate_ring([0.0], [32 * MIB], Link(1), software=0.0)
    assert end == pytest.approx(32 * MIB / 125e6, rel=0.01), "each of two ranks sends as many bytes as the tensor has"


def test_the_software_alone_takes_its_time_per_byte():
    (end,) = simulate_ring([0.0], [32 * MIB], Link(), software=1e-9)
    assert end == pytest.approx(32 * MIB * 1e-9, rel=0.05)


def test_on_a_slow_and_long_link_each_segment_takes_its_transmission_and_one_delay():
    """The announcement of the next segment waits for the transmission of the segment that is being sent."""
    delay = 0.005
    transmission = MIB / 125e6  # 8.4 ms, longer than the delay
    (end,) = simulate_ring([0.0], [32 * MIB], Link(1, 5), software=0.0)
    per_phase = 16 * (transmission + delay) + delay
    assert end == pytest.approx(2 * per_phase, rel=0.05)


def test_on_a_fast_and_long_link_each_pair_of_segments_takes_two_delays():
    (end,) = simulate_ring([0.0], [32 * MIB], Link(100, 5), software=0.0)
    assert end == pytest.approx(2 * 8 * 2 * 0.005, rel=0.05)


def test_a_bucket_starts_when_it_is_ready_and_three_share_the_link():
    ends = simulate_ring([1.0, 1.0, 1.0], [10_000_000] * 3, Link(8), software=0.0)
    assert max(ends) == pytest.approx(1.03, rel=0.001)
    assert ends[2] == max(ends), "only two all-reduces are in progress at once"


def test_segments_are_at_most_one_mebibyte_and_at_least_two_per_phase():
    assert segments_per_phase(4) == 2
    assert segments_per_phase(4 * LARGEST_SEGMENT) == 2
    assert segments_per_phase(4 * LARGEST_SEGMENT + 1) == 3


links = {
    "gbit": st.floats(0.08, 800),
    "delay_ms": st.floats(0, 50),
    "software": st.floats(0, 1e-8),
    "size": st.integers(4, 64 * MIB),
}


@given(**links, factor=st.floats(1, 10))
def test_a_larger_tensor_or_a_worse_link_is_never_faster(gbit, delay_ms, software, size, factor):
    def end(size: float, link: Link) -> float:
        return simulate_ring([0.0], [int(size)], link, software=software)[0]

    link = Link(gbit, delay_ms)
    base = end(size, link)
    slack = 4 * WAKE_UP * segments_per_phase(size)  # which of two things is sent first may change
    worst = slack + 2 * segments_per_phase(size) * link.delay
    assert end(size, Link(gbit / factor, delay_ms)) >= base - worst
    assert end(size, Link(gbit, delay_ms * factor)) >= base - slack
    assert end(size * factor, link) >= base - worst


@given(**links)
def test_the_time_lies_between_the_bounds_of_the_rate_and_of_no_overlap(gbit, delay_ms, software, size):
    link = Link(gbit, delay_ms)
    (end,) = simulate_ring([0.0], [size], link, software=software)
    segments, transmission = 2 * segments_per_phase(size), size / link.bytes_per_second
    assert end >= max(transmission, size * software) * 0.999 + 4 * link.delay * 0.999
    assert end <= (transmission + size * software + segments * (2 * link.delay + WAKE_UP)) * 1.001 + 1e-9
