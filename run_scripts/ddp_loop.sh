#!/usr/bin/env bash
# Train with the hand-written DDP loop on this machine, setup included.
#
#   bash run_scripts/ddp_loop.sh [--help | settings]
#   NPROC_PER_NODE=4 bash run_scripts/ddp_loop.sh    # four processes; default: one per GPU, or 2 without GPUs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash run_scripts/setup.sh
exec .venv/bin/python -m app train --nproc_per_node="${NPROC_PER_NODE:-auto}" "$@"
