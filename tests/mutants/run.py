"""Plant faults in a copy of the project, one at a time, and check that the tests catch them.

    python tests/mutants/run.py         # all, each with the tests that faults.yaml names
    python tests/mutants/run.py 5 17    # only these faults, counted from 1

A fault that changes a training must also be located by a trace of its tensors (`--trace_tensors`): `differs` in
faults.yaml describes the first tensor that differs. Prints a line for each fault. The exit status is 1 if the tests of
any fault pass, or if it is located elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

PROJECT = Path(__file__).parents[2]
LIMIT = 1800  # seconds for the tests of a fault
TRAINING = "--csv=reviews.csv --use_cpu --threads=1 --model=tiny-bert --logical_ranks=4 --train_batch_size=16"
TRAINING += " --max_length=32 --warmup_steps=0 --dropout=0.1 --trace_tensors=1:4 --save_strategy=steps --save_steps=2"
TRAINING += " --max_steps=4"  # of which the last one is in the second epoch
EXAMPLE = "docs/examples/plain_loop.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, metavar="N", help="faults to plant; by default all")
    numbers = parser.parse_args().numbers
    faults = yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text(encoding="utf-8"))
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name, "project")
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, check=True).stdout
        for file in listed.decode().split("\0")[:-1]:
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / file, copy / file)
        for number, fault in enumerate(faults, start=1):
            if numbers and number not in numbers:
                continue
            start, path, place = time.monotonic(), copy / fault["file"], ""
            reference = trace(copy, fault, "reference") if "differs" in fault else []
            original = path.read_text(encoding="utf-8")
            if original.count(fault["old"]) != 1:
                sys.exit(f"fault {number}: its text must occur once in {fault['file']}: {fault['old']!r}")
            path.write_text(original.replace(fault["old"], fault["new"]), encoding="utf-8")
            is_caught = run_tests(copy, fault["tests"].split())
            if reference:
                place = first_difference(reference, trace(copy, fault, "planted"))
                is_caught = is_caught and re.search(fault["differs"], place) is not None
            path.write_text(original, encoding="utf-8")
            missed += not is_caught
            seconds = time.monotonic() - start
            result = "caught" if is_caught else "MISSED"
            print(f"{number:3} {result} {seconds:4.0f} s  {fault['fault']}{place}", flush=True)
    return int(missed > 0)


def run_tests(copy: Path, tests: list[str]) -> bool:
    """Run tests in the copy until one fails, and return whether one did."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode not in (0, 1):
        sys.exit(f"the tests could not run:\n{done.stdout}{done.stderr}")
    return done.returncode == 1


def trace(copy: Path, fault: dict[str, Any], folder: str) -> list[str]:
    """Train in the copy, as the fault describes, and return the lines of tensors.jsonl."""
    shutil.rmtree(copy / folder, ignore_errors=True)
    reviews = pd.read_csv(copy / "data" / "sample_reviews.csv").sample(60, random_state=0)
    reviews.to_csv(copy / "reviews.csv", index=False)
    flags = f"{TRAINING} --output_dir={folder} {fault.get('flags', '')}"
    if folder == "planted" and fault.get("resumes"):
        flags += " --resume_from_checkpoint=reference/checkpoints/checkpoint-2"
    program = f"-m app.ddp_loop {flags}"
    if fault.get("example"):
        text, program = (copy / EXAMPLE).read_text(encoding="utf-8"), "traced_example.py"
        traced = f'tree.trace_tensors("{folder}/tensors.jsonl", 1, 3)\nsampler = '
        (copy / program).write_text(text.replace("sampler = ", traced, 1), encoding="utf-8")
        (copy / "samebits").unlink(missing_ok=True)
        (copy / "samebits").symlink_to("app")
    torchrun = f"-m torch.distributed.run --standalone --nproc_per_node={fault.get('ranks', 1)} {program}"
    environment = os.environ | {"PYTHONPATH": str(copy)}
    command = [sys.executable, *torchrun.split()]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode != 0:
        sys.exit(f"the training failed:\n{done.stdout}{done.stderr}")
    return (copy / folder / "tensors.jsonl").read_text(encoding="utf-8").splitlines()


def first_difference(reference: list[str], planted: list[str]) -> str:
    """Describe the first tensor that differs."""
    for expected, found in zip(reference, planted, strict=True):
        if expected != found:
            line = json.loads(found)
            return ", first at " + " ".join(str(line[key]) for key in ("step", "logical_rank", "phase", "name"))
    return ", no tensor differs"


if __name__ == "__main__":
    sys.exit(main())
