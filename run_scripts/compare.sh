#!/usr/bin/env bash
# Set up, then walk both roads and compare them:  bash run_scripts/compare.sh [--help | settings]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash run_scripts/setup.sh
exec .venv/bin/python -m app.compare "$@"
