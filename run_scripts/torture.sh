#!/usr/bin/env bash
# Kills ranks at random moments, again and again; every run must end as the undisturbed one:  bash run_scripts/torture.sh [--kills 50] [--seed 0]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash run_scripts/setup.sh
exec .venv/bin/python run_scripts/torture.py "$@"
