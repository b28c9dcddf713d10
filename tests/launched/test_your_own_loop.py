"""The examples of docs/your_own_loop.md: one hash at any number of processes, and another one without the tree."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.jobs import PROJECT, Job

pytestmark = pytest.mark.launched
EXAMPLES = sorted((PROJECT / "docs" / "examples").glob("*.py"))
PLAIN_DDP = {  # what the tree does, done by DDP alone: each process trains on all of its rows at once
    "tree = FixedTree(model, logical_ranks=4, threads=1)": "torch.set_num_threads(1)",
    "logical_ranks=4": "logical_ranks=dist.get_world_size()",
    "for logical_rank in tree.logical_ranks:": "for _ in range(1):",
    "with tree.micro_batch(step, logical_rank, seed=42):": "if optimizer.zero_grad() is None:",
    "tree.clip_grad_norm_(1.0)": "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    # FixedTree does this as well: DDP's reducer must not be the last one that releases gloo's group.
    "\ndist.destroy": "\nmodel.group = model.process_group\ndist.destroy",
}


def hash_of(program: Path, ranks: int, folder: Path) -> str:
    """Run an example, with this checkout as the package `samebits`, and return the line that it prints."""
    (folder / "samebits").symlink_to(PROJECT / "app")
    with Job(str(program), cwd=folder, ranks=ranks, PYTHONPATH=str(folder)) as job:
        done = job.finish()
    (folder / "samebits").unlink()
    assert done.status == 0, done.err
    line = done.out.splitlines()[-1]
    assert len(line) == len(bytes.fromhex(line)) * 2 == 64
    return line


# accelerate only wraps the model, whose loop is that of plain_loop.
@pytest.mark.parametrize(
    "example",
    [pytest.param(path, marks=pytest.mark.slow if path.stem == "with_accelerate" else []) for path in EXAMPLES],
    ids=lambda path: path.stem,
)
def test_an_example_has_one_hash_at_1_2_and_4_processes(example, tmp_path):
    assert len(example.read_text().splitlines()) <= 40
    # With 0, it is started without torchrun: the model is not wrapped in DistributedDataParallel.
    ranks = (1, 2, 4) if example.stem == "plain_loop" else (0, 2, 4)
    assert len({hash_of(example, n, tmp_path) for n in ranks}) == 1


def test_without_the_tree_the_weights_depend_on_the_number_of_processes(tmp_path):
    program, text = tmp_path / "plain_ddp.py", EXAMPLES[0].read_text()
    for line, replacement in PLAIN_DDP.items():
        assert line in text
        text = text.replace(line, replacement)
    program.write_text(text)
    one, two, again = (hash_of(program, n, tmp_path) for n in (1, 2, 2))
    assert one != two == again
