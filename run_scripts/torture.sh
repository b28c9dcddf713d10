#!/usr/bin/env bash
# Kill ranks at random moments; every run must end like an undisturbed one:  bash run_scripts/torture.sh [--kills 50] [--seed 0] [--models bert gpt2 bart]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash run_scripts/setup.sh
exec .venv/bin/python run_scripts/torture.py "$@"
