#!/usr/bin/env bash
# Set up, check the style and the types, then run the tests:  bash run_scripts/test.sh [pytest's arguments]
# Those that take minutes are left out; with them:  bash run_scripts/test.sh -m "slow or not slow"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash run_scripts/setup.sh
.venv/bin/python -m ruff check --quiet .
.venv/bin/python -m ruff format --check --quiet .
.venv/bin/python -m mypy app
exec .venv/bin/python -m pytest "$@"
