#!/usr/bin/env bash
# Set up, check style and types, and run the tests, with one worker per core:
#
#     bash run_scripts/test.sh                          # without the slow tests
#     bash run_scripts/test.sh -m "slow or not slow"    # all tests
#     bash run_scripts/test.sh -n 0 tests/launched/test_laws.py
#
# Further arguments are pytest's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash run_scripts/setup.sh
.venv/bin/python -m ruff check --quiet .
.venv/bin/python -m ruff format --check --quiet .
.venv/bin/python -m mypy app
# Tests of one file share jobs, so they run in the same worker. At most 4 workers: each starts jobs of up to 4 processes,
# which need 0.7 GiB of memory each. Files keep the order of tests/conftest.py, so that no worker waits for the
# shared jobs.
exec .venv/bin/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder "$@"
