"""The laboratory's section on collectives, with one rank; tests/launched has more of them."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.bench.alpha_beta import bus_bandwidth_factor
from app.bench.charts import Line, format_seconds, time_by_size
from app.bench.communication import collectives_section
from app.bench.communication.collectives import COLLECTIVES, VARIANTS, as_chunk, prepare, take_pictures
from app.bench.communication.collectives_section import (
    ELEMENT,
    SMALLEST,
    check_largest,
    fit_line,
    measure_collectives,
    sizes_up_to,
)
from app.bench.page import Chunk, as_html, as_markdown
from app.cli import parse_flags
from app.common.errors import AgreedError, UserError
from app.common.formats import format_size
from app.flags import add_communication_flags
from app.settings import Settings


def test_there_are_eight_collectives_and_each_has_a_bus_bandwidth():
    names = [collective.name for collective in COLLECTIVES]
    assert len(set(names)) == 8
    assert all(bus_bandwidth_factor(name, 4) > 0 for name in names)
    assert all(variant.partition(",")[0] in names for variant in VARIANTS)


def test_a_single_rank_keeps_its_data(world):
    pictures = take_pictures(world)
    assert [picture.title for picture in pictures] == [collective.name for collective in COLLECTIVES]
    for picture in pictures:
        assert picture.before == picture.after == [[Chunk("11", [0])]]


def test_the_bits_of_a_chunk_name_its_ranks():
    assert as_chunk((63, 0b111)) == Chunk("63", [0, 1, 2])
    assert as_chunk((53, 0b10010)) == Chunk("53", [1, 4])
    assert as_chunk(None) is None


def test_an_unknown_collective_is_an_error(world):
    with pytest.raises(ValueError, match="shuffle"):
        prepare("shuffle", torch.zeros(1, 1), torch.zeros(1, 1), world=world)


@given(st.integers(2**14, 2**40), st.integers(1, 1024))
def test_sizes_grow_to_the_largest_and_divide_among_the_ranks(largest, ranks):
    sizes = sizes_up_to(largest, ranks)
    assert sizes == sorted(set(sizes))
    assert all(size % (ranks * ELEMENT) == 0 for size in sizes)
    assert 0 <= sizes[-1] - largest < ranks * ELEMENT
    assert 0 <= sizes[0] - SMALLEST < ranks * ELEMENT


def test_the_section_shows_pictures_times_and_fits(world):
    section = measure_collectives(world, 2**14, seconds_per_point=1e-4, disable_tqdm=True)
    times = section.data["times"]
    assert list(times) == [*(collective.name for collective in COLLECTIVES), *VARIANTS]
    for curve in times.values():
        assert [point["bytes"] for point in curve["points"]] == [2**10, 2**12, 2**14]
        assert curve["fit"]["points"] == 3
    text, page = as_markdown(section), as_html("Title", {}, [section])
    for name in times:
        assert re.search(rf"^\| {name} .*±.*%", text, re.MULTILINE), name
        assert page.count(name) >= 2
    assert "With one rank nothing is sent" in text
    assert max(map(len, text.splitlines())) <= 120


def test_sizes_that_do_not_fit_into_memory_are_skipped(world, monkeypatch):
    monkeypatch.setattr(collectives_section, "largest_that_fits", lambda world: 2**15)
    section = measure_collectives(world, 2**18, seconds_per_point=1e-4, disable_tqdm=True)
    assert any(paragraph.startswith("Skipped: 64 KiB, 256 KiB.") for paragraph in section.paragraphs)
    assert {point["bytes"] for curve in section.data["times"].values() for point in curve["points"]} == {
        2**10,
        2**12,
        2**14,
    }


def test_too_few_sizes_for_a_fit_are_one_line(world, monkeypatch):
    with pytest.raises(UserError, match=r"^--largest_mib 0.015625: .* among 2000 ranks: use 0.13 or more$"):
        check_largest(2**14, 2000)
    check_largest(2**14, 256)
    monkeypatch.setattr(collectives_section, "largest_that_fits", lambda world: 2**13)
    with pytest.raises(AgreedError, match=r"^the free memory is enough for 2 sizes"):
        measure_collectives(world, 2**18, seconds_per_point=1e-4, disable_tqdm=True)


@given(st.integers(1, 10**6))
def test_the_size_that_is_suggested_is_enough(ranks):
    try:
        check_largest(2**14, ranks)
    except UserError as problem:
        check_largest(int(float(str(problem).split()[-3]) * 2**20), ranks)


def test_a_point_is_the_median_of_its_rounds():
    line = fit_line("broadcast", [(size, [9.0, size, 1e9]) for size in (100, 200, 300)])
    assert line.seconds == [100, 200, 300]
    assert line.fit.beta == pytest.approx(1)


@pytest.mark.parametrize(
    ("size", "text"),
    [(1020, "1020 bytes"), (2**10, "1 KiB"), (2**20 - 4, "1020 KiB"), (2**28, "256 MiB"), (3 * 2**39, "1540 GiB")],
)
def test_sizes_have_binary_units(size, text):
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5.214e-5, "52.1 µs"), (9.999e-4, "1 ms"), (0.25, "250 ms"), (0.9996, "1 s"), (61.24, "61.2 s")],
)
def test_times_have_units(seconds, text):
    assert format_seconds(seconds) == text


def test_a_chart_has_a_legend_if_it_has_several_lines():
    points = [(size, [size * 1e-9 + 1e-4]) for size in (2**10, 2**14, 2**20, 2**28)]
    one, two = fit_line("broadcast", points), fit_line("broadcast, <b>", points)
    assert isinstance(one, Line)
    assert ">broadcast<" not in time_by_size([one], (1e-5, 1))
    chart = time_by_size([one, two], (1e-5, 1))
    assert ">broadcast<" in chart
    assert "&lt;b&gt;" in chart


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--largest_mib", "many"], "argument --largest_mib/--largest-mib: many: must be a number above 0"),
        (["--largest_mib", "nan"], "argument --largest_mib/--largest-mib: nan: must be a number above 0"),
        (["--largest_mib", "0.01"], r"argument --\S+: 0.01: must be from 0.015625 \(16 KiB\) to 1,048,576"),
        (["--seconds_per_point", "0"], "argument --seconds_per_point/--seconds-per-point: 0: must be a number above 0"),
        (["--sections", "weather"], "argument --sections: invalid choice: 'weather'"),
        (["--sections"], "argument --sections: expected at least one argument"),
    ],
)
def test_a_flag_that_makes_no_sense_is_one_line(flags, message):
    with pytest.raises(UserError, match=f"^{message}.*--help lists all flags") as caught:
        parse_flags(None, flags, add_communication_flags)
    assert len(str(caught.value).splitlines()) == 1


def test_the_program_has_flags_of_its_own():
    settings, own = parse_flags(
        None, ["--sections", "collectives", "--largest_mib", "0.5", "--use_cpu"], add_communication_flags
    )
    assert settings == Settings(model="tiny-bert", use_cpu=True)
    assert own == {"sections": ["collectives"], "link": None, "largest_mib": 0.5, "seconds_per_point": 1.0, "seeds": 3}
