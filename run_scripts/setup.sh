#!/usr/bin/env bash
# Create .venv with the pinned packages of constraints.txt and this project as an editable install.
#
#   bash run_scripts/setup.sh                              the first call downloads PyTorch, later ones return at once
#   bash run_scripts/setup.sh --deepspeed                  also install DeepSpeed, and update it in later calls
#   PYTHON=/path/to/python3.12 bash run_scripts/setup.sh   use this Python (3.11 to 3.14)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

root=$(pwd -P) stamp=.venv/.setup-stamp # the folder in which .venv was created (it cannot be moved), and what is installed
case ${1:-} in
  '') extras=$(tail -n 1 "$stamp" 2>/dev/null) || extras=dev ;;
  --deepspeed) extras=dev,deepspeed ;;
  *) echo "setup.sh: unknown argument $1: only --deepspeed is possible" >&2; exit 1 ;;
esac
state=$(echo "$root" && cat pyproject.toml constraints.txt && echo "$extras")
if [ "$(cat "$stamp" 2>/dev/null)" = "$state" ]; then exit 0; fi
if [ -L .venv ]; then
  echo "setup.sh: .venv is a link to $(readlink .venv), which is used as it is: nothing is installed" >&2; exit 0
fi
echo "setup.sh: installing into .venv. The first time, pip downloads PyTorch and other packages: about 0.5 GB, or more" \
  "than 3 GB on Linux if PyTorch includes CUDA, which is PyPI's default. This takes some minutes." >&2
if [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" != "$root" ]; then rm -rf .venv; fi
[ -e .venv ] || "${PYTHON:-python3}" -m venv .venv || { rm -rf .venv && exit 1; }
rm -f "$stamp" # if this fails or is interrupted, the next call tries again
pip_install() { # of what pip prints, show the large downloads
  .venv/bin/python -m pip install --progress-bar off --constraint constraints.txt "$@" |
    { grep --line-buffered -E 'Downloading .*\([0-9.]+ [MG]B\)' >&2 || true; }
}
pip_install setuptools # the build backend is pinned, too; DeepSpeed's build needs PyTorch, but no operations
pip_install --no-build-isolation --editable '.[dev]'
[ "$extras" = dev ] || DS_BUILD_OPS=0 pip_install --no-build-isolation --editable ".[$extras]"
echo "$state" >"$stamp"
