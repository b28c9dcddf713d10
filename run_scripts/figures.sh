#!/usr/bin/env bash
# Measure the figures of the documentation: run the commands of docs/figures.yaml, write what they print into the pages,
# and generate docs/results.md and docs/settings.md.
#
#   bash run_scripts/figures.sh              all figures
#   bash run_scripts/figures.sh ID…          some of them
#   bash run_scripts/figures.sh --pages      run nothing: only write the pages again, from figures.yaml
#   bash run_scripts/figures.sh --check      write nothing: fail if a figure that should not have changed has changed
set -euo pipefail
reviews=${CHNSENTICORP_CSV:+$(realpath "$CHNSENTICORP_CSV")} # a relative path is one of the caller's folder
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash run_scripts/setup.sh
csv=data/ChnSentiCorp_htl_all.csv
[ -e "$csv" ] || [ ! -f "$reviews" ] || ln -sf "$reviews" "$csv"
PATH=$PWD/.venv/bin:$PATH exec python -m run_scripts.figures "$@"
