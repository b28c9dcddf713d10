"""The laboratory's section on collectives, with one rank; tests/launched has more of them."""

from __future__ import annotations

from app.bench import collectives
from app.bench.collectives import COLLECTIVES, sizes_up_to


def test_every_collective_is_pictured_and_timed(make_lab):
    lab = make_lab()
    collectives.collectives(lab)
    numbers = lab.page.numbers
    assert numbers["pictures"] == {name: {"before": [[11]], "after": [[11]]} for name in COLLECTIVES}
    names = [*COLLECTIVES, "reduce-scatter, pairwise", "all-gather, in place"]
    assert set(numbers["seconds"]) == {str((name, size)) for name in names for size in (2**10, 2**12, 2**14, 2**16)}
    assert min(map(min, numbers["seconds"].values())) > 0
    assert all(name in lab.page.text[-1] for name in names)


def test_sizes_can_be_divided_among_all_ranks():
    assert sizes_up_to(2**16, 3) == [1032, 4104, 16392, 65544]
    assert sizes_up_to(2**20 + 1, 1)[-2:] == [2**20, 2**20 + 4]
