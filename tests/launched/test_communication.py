"""The communication laboratory in real processes: its sections, and the files that are written."""

from __future__ import annotations

import json

import pytest
from helpers.architectures import write_model
from helpers.jobs import LIMIT, unavailable

from app.bench.communication import DEFAULT
from app.distributed.launcher import TorchrunJob, torchrun_command

pytestmark = pytest.mark.launched


@pytest.mark.slow
def test_the_laboratory_measures_training_steps_on_two_ranks(launch, review_csv, tmp_path):
    flags = ["--use_cpu", "--threads", 1, "--disable_tqdm", "--output_dir", "out", "--seconds_per_point", 0.001]
    flags += ["--csv", review_csv(150), "--max_length", 16, "--train_batch_size", 8]
    flags += ["--model", write_model(tmp_path / "model", "bert")]
    done = launch("app.bench.communication", *flags, "--sections", *DEFAULT, "readiness", ranks=2)
    assert done.status == 0, done.err
    content = json.loads((tmp_path / "out" / "communication.json").read_text())
    sections = content["sections"]
    assert list(sections) == [*DEFAULT, "readiness"]
    assert content["machine"]["backend"] == "gloo"
    assert content["machine"]["ranks"] == "2 on 1 node(s)"
    assert content["machine"]["command"].startswith("python -m app.bench.communication --use_cpu --threads 1 ")
    assert content["settings"]["threads"] == 1
    assert (tmp_path / "out" / "communication.md").read_text().rstrip() in done.out
    assert "written to out/" in done.out
    assert 0 < min(sections["readiness"]["seconds"].values()) < max(sections["readiness"]["seconds"].values())


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
        status = job.torchrun.wait(LIMIT)
    text = (tmp_path / "log").read_text()
    if status == 2 and "two nodes on one machine need" in text:
        unavailable(text)
    assert status == 0, text
    content = json.loads((tmp_path / "out" / "communication.json").read_text())
    assert content["machine"]["ranks"] == "2 on 2 node(s)"
    assert content["machine"]["link"] == "0.05 Gbit/s, 2 ms"
    assert list(content["sections"]) == ["breakdown", "compression"]
