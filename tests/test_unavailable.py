"""A test that its machine cannot run is skipped, but in CI it fails: CI cannot pass without its proofs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from jobs import PROJECT

TESTS = PROJECT / "tests"
# What each needs is removed: the first two, the real CSV; the last, Chromium.
NEEDY = {
    "reviews/test_split.py": "test_the_real_csv_has_the_known_split",
    "launched/test_parity.py": "test_a_cell_is_equal_to_the_bit[1,4,group_by_length,bf16]",
    "launched/test_page.py": "test_it_prints",
}


def outcomes(tmp_path: Path, names: dict[str, str], **environment: str) -> tuple[int, str]:
    """Exit status and report of pytest over copies of these tests, in a project without data and a PATH without
    programs."""
    tests = tmp_path / "tests"
    for source in [*TESTS.glob("*.py"), *(TESTS / name for name in names)]:
        copy = tests / source.relative_to(TESTS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    shutil.copy(PROJECT / "pyproject.toml", tmp_path)
    (tmp_path / "run_scripts").symlink_to(PROJECT / "run_scripts")
    variables = {name: value for name, value in os.environ.items() if name not in ("CI", "CHNSENTICORP_CSV")}
    variables |= {"PYTHONPATH": str(PROJECT), "PATH": str(tmp_path)} | environment
    chosen = [f"tests/{file}::{test}" for file, test in names.items()]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *chosen]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout


def test_in_ci_a_missing_csv_or_program_fails_the_tests_that_need_it(tmp_path):
    status, report = outcomes(tmp_path, NEEDY, CI="true")
    assert status == 1, report
    ends = set(re.findall(r"^(ERROR|FAILED|SKIPPED|PASSED) tests/\S+::(\w+)", report, re.MULTILINE))
    assert ends == {("ERROR", test.partition("[")[0]) for test in NEEDY.values()}, report


def test_elsewhere_they_are_skipped(tmp_path):
    needy = {file: test for file, test in NEEDY.items() if "parity" not in file}  # that one runs on the sample
    status, report = outcomes(tmp_path, needy)
    assert status == 0, report
    assert re.search(rf"=+ {len(needy)} skipped in ", report), report


def test_every_skip_is_one_that_fails_in_ci():
    """Only tests of a GPU may be skipped there."""
    skips = {
        (path.relative_to(TESTS).as_posix(), line.strip())
        for path in TESTS.rglob("*.py")
        for line in path.read_text("utf-8").splitlines()
        if re.search(r"\b(pytest\.skip|mark\.skip|skipif|importorskip|SkipTest|xfail)\b", line)
        and not re.search("gpu|cuda", line, re.IGNORECASE)
    }
    assert {file for file, _ in skips} == {"jobs.py", Path(__file__).name}, skips
    assert [line for file, line in skips if file == "jobs.py"] == ["pytest.skip(reason)"]
