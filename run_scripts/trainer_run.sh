#!/usr/bin/env bash
# Train with transformers.Trainer on this machine, setup included.
#
#   bash run_scripts/trainer_run.sh [--help | settings]
#   NPROC_PER_NODE=4 bash run_scripts/trainer_run.sh    # four processes; default: one per GPU, or 2 without GPUs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash run_scripts/setup.sh
exec .venv/bin/python -m app trainer --nproc_per_node="${NPROC_PER_NODE:-auto}" "$@"
