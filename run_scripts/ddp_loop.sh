#!/usr/bin/env bash
# Road 1, the loop by hand, on this machine:  NPROC_PER_NODE=2 bash run_scripts/ddp_loop.sh [--help | settings]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash run_scripts/setup.sh
exec .venv/bin/torchrun --standalone --nproc_per_node="${NPROC_PER_NODE:-2}" -m app.ddp_loop "$@"
