"""The communication laboratory in real processes: what the collectives do, and the files that are written."""

from __future__ import annotations

import json

import pytest
from helpers.architectures import write_model
from helpers.jobs import LIMIT, unavailable

from app.bench.collectives import COLLECTIVES
from app.bench.communication import STEPS
from app.distributed.launcher import TorchrunJob, torchrun_command

pytestmark = pytest.mark.launched

Rows = list[list[int | None]]


def expected(ranks: int) -> dict[str, tuple[Rows, Rows]]:
    """What each collective has to do with chunk c of rank r, which is 10 (r + 1) + c + 1."""
    everyone = range(ranks)
    complete = [[10 * (r + 1) + c + 1 for c in everyone] for r in everyone]
    own = [[complete[r][r] if c == r else None for c in everyone] for r in everyone]
    nothing: list[int | None] = [None] * ranks
    only_first = [[*complete[0]], *[nothing] * (ranks - 1)]
    diagonal = [complete[r][r] for r in everyone]
    sums = [sum(column) for column in zip(*complete, strict=True)]
    return {
        "scatter": (only_first, [[complete[0][r] if c == r else None for c in everyone] for r in everyone]),
        "gather": (own, [diagonal, *[nothing] * (ranks - 1)]),
        "broadcast": (complete, [complete[0]] * ranks),
        "all-reduce": (complete, [sums] * ranks),
        "reduce-scatter": (complete, [[sums[r] if c == r else None for c in everyone] for r in everyone]),
        "all-gather": (own, [diagonal] * ranks),
        "all-to-all": (complete, [list(column) for column in zip(*complete, strict=True)]),
    }


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_laboratory_shows_and_times_every_collective(launch, tmp_path, ranks):
    flags = ["--use_cpu", "--threads", 1, "--disable_tqdm", "--sections", "collectives", "--output_dir", "out"]
    flags += ["--largest_mib", 0.0625, "--seconds_per_point", 0.001, "--train_batch_size", 6]
    done = launch("app.bench.communication", *flags, ranks=ranks)
    assert done.status == 0, done.err
    assert "written to out/" in done.out
    content = json.loads((tmp_path / "out" / "communication.json").read_text())
    assert content["machine"]["backend"] == "gloo"
    assert content["machine"]["ranks"] == f"{ranks} on 1 node(s)"

    section = content["sections"]["collectives"]
    pictures = section["pictures"]
    assert {name: (pictures[name]["before"], pictures[name]["after"]) for name in expected(ranks)} == expected(ranks)
    reduced = pictures["reduce"]
    assert reduced["before"] == pictures["all-reduce"]["before"]
    assert reduced["after"][0] == pictures["all-reduce"]["after"][0], "what other ranks hold is undefined"
    assert list(pictures) == [*COLLECTIVES]

    assert len(section["seconds"]) == 4 * len([*pictures, "reduce-scatter, pairwise", "all-gather, in place"])
    assert min(map(min, section["seconds"].values())) > 0
    # Pictures are what the ranks held, and the text shows the same.
    last_sum = pictures["all-reduce"]["after"][-1]
    row = [f"rank {ranks - 1}", *pictures["all-reduce"]["before"][-1], *last_sum]
    assert " ".join(map(str, row)) in " ".join(done.out.replace("|", " ").split())
    assert (tmp_path / "out" / "communication.md").read_text().rstrip() in done.out
    assert content["machine"]["command"].startswith("python -m app.bench.communication --use_cpu --threads 1 ")
    assert content["settings"]["threads"] == 1
    page = (tmp_path / "out" / "communication.html").read_text()
    assert page.count("<svg") == 1
    assert "var(--s1)" in page


@pytest.mark.slow
def test_the_laboratory_measures_training_steps_on_two_ranks(launch, review_csv, tmp_path):
    flags = ["--use_cpu", "--threads", 1, "--disable_tqdm", "--output_dir", "out", "--seconds_per_point", 0.001]
    flags += ["--csv", review_csv(150), "--max_length", 16, "--train_batch_size", 8]
    flags += ["--model", write_model(tmp_path / "model", "bert")]
    done = launch("app.bench.communication", *flags, "--sections", *STEPS, "readiness", ranks=2)
    assert done.status == 0, done.err
    sections = json.loads((tmp_path / "out" / "communication.json").read_text())["sections"]
    assert list(sections) == [*STEPS, "readiness"]
    assert 0 < sections["readiness"]["seconds"][0] < sections["readiness"]["seconds"][-1]


@pytest.mark.slow
def test_every_exchange_of_the_ladder_trains_alike(launch, review_csv, tmp_path):
    flags = ["--use_cpu", "--threads", 1, "--disable_tqdm", "--output_dir", "out", "--seconds_per_point", 0.001]
    flags += ["--csv", review_csv(150), "--max_length", 16, "--train_batch_size", 8]
    flags += ["--model", write_model(tmp_path / "model", "bert"), "--sections", "ladder", "convergence"]
    flags += ["--max_steps", 8, "--seeds", 1]
    done = launch("app.bench.communication", *flags, ranks=2)
    assert done.status == 0, done.err
    sections = json.loads((tmp_path / "out" / "communication.json").read_text())["sections"]
    losses = sections["convergence"]["losses"].values()
    assert [len(of_seeds[0]) for of_seeds in losses] == [8, 4, 4, 2, 2, 1, 1]
    differences = sections["ladder"]["loss_differences"]
    assert differences.pop("no exchange") > 0
    # The sum of two gradients does not depend on their order, so the losses are the same with any buckets.
    assert set(differences.values()) == {0.0}
    assert len(differences) == 10


@pytest.mark.slow
def test_a_link_needs_a_start_without_torchrun(launch):
    done = launch("app.bench.communication", "--link", "1:1", "--use_cpu", ranks=2)
    assert done.status != 0
    assert "--link: starts its own two ranks: use python -m app.bench.communication, without torchrun" in done.err


@pytest.mark.slow
def test_steps_are_timed_over_a_link(review_csv, tmp_path):
    flags = ["--disable_tqdm", "--output_dir", tmp_path / "out", "--seconds_per_point", 0.001]
    flags += ["--csv", review_csv(150), "--max_length", 16, "--train_batch_size", 8, "--link", "0.05:2"]
    flags += ["--model", write_model(tmp_path / "model", "bert"), "--sections", "breakdown", "compression"]
    command = torchrun_command("app.bench.communication", flags, nproc_per_node=0)
    with TorchrunJob(command, stdout=tmp_path / "log", cwd=tmp_path) as job:
        status = job.wait(LIMIT)
    text = (tmp_path / "log").read_text()
    if status == 2 and "two nodes on one machine need" in text:
        unavailable(text)
    assert status == 0, text
    content = json.loads((tmp_path / "out" / "communication.json").read_text())
    assert content["machine"]["ranks"] == "2 on 2 node(s)"
    assert content["machine"]["link"] == "0.05 Gbit/s, 2 ms"
    assert list(content["sections"]) == ["breakdown", "compression"]
