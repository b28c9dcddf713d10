#!/usr/bin/env bash
# What does a checkpoint every 50 steps cost?  NPROC_PER_NODE=2 bash run_scripts/benchmark_checkpoints.sh [settings]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash run_scripts/setup.sh
exec .venv/bin/torchrun --standalone --nproc_per_node="${NPROC_PER_NODE:-2}" run_scripts/benchmark_checkpoints.py "$@"
