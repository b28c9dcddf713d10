"""Plant faults in a copy of the project, one at a time, and check that the tests catch them.

    python tests/mutants/run.py         # all, each with the tests that faults.yaml names
    python tests/mutants/run.py 5 17    # only these faults, counted from 1

Prints a line for each fault. The exit status is 1 if the tests of any fault pass.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

PROJECT = Path(__file__).parents[2]
LIMIT = 1800  # seconds for the tests of a fault


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
            start, path = time.monotonic(), copy / fault["file"]
            original = path.read_text(encoding="utf-8")
            if original.count(fault["old"]) != 1:
                sys.exit(f"fault {number}: its text must occur once in {fault['file']}: {fault['old']!r}")
            path.write_text(original.replace(fault["old"], fault["new"]), encoding="utf-8")
            is_caught = run_tests(copy, fault["tests"].split())
            path.write_text(original, encoding="utf-8")
            missed += not is_caught
            seconds = time.monotonic() - start
            print(f"{number:3} {'caught' if is_caught else 'MISSED'} {seconds:4.0f} s  {fault['fault']}", flush=True)
    return int(missed > 0)


def run_tests(copy: Path, tests: list[str]) -> bool:
    """Run tests in the copy until one fails, and return whether one did."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode not in (0, 1):
        sys.exit(f"the tests could not run:\n{done.stdout}{done.stderr}")
    return done.returncode == 1


if __name__ == "__main__":
    sys.exit(main())
