#!/usr/bin/env bash
# Train with transformers.Trainer on this machine, setup included.
#
#   bash run_scripts/trainer_run.sh [--help | settings]
#   NPROC_PER_NODE=4 bash run_scripts/trainer_run.sh    # four processes; default: one per GPU, or 2 without GPUs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash run_scripts/setup.sh
# torchrun's own --nproc_per_node=gpu fails without GPUs.
processes=$(.venv/bin/python -m app.nproc_per_node "$@") || exit 2
exec .venv/bin/torchrun --standalone --nproc_per_node="$processes" -m app.trainer_run "$@"
