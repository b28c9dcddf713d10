#!/usr/bin/env bash
# Train with both training paths on this machine and compare the runs, setup included.
#
#   bash run_scripts/compare.sh [--help | settings]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash run_scripts/setup.sh
exec .venv/bin/python -m app.compare "$@"
