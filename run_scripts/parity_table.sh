#!/usr/bin/env bash
# Are the two roads equal to the bit, whatever the ranks, accumulation, sampling and precision?  About half an hour on
# two cores:  bash run_scripts/parity_table.sh [--csv PATH | other settings]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash run_scripts/setup.sh
exec .venv/bin/python run_scripts/parity_table.py "$@"
