#!/usr/bin/env bash
# Create .venv with the pinned packages of constraints.txt and this project as an editable install.
#
#   bash run_scripts/setup.sh                              the first call downloads PyTorch, later ones return at once
#   bash run_scripts/setup.sh --deepspeed                  also install DeepSpeed, and update it in later calls
#   PYTHON=/path/to/python3.12 bash run_scripts/setup.sh   use this Python
#
# .venv/.setup-stamp records where .venv was created (a virtual environment cannot be moved) and what was installed.
# A .venv without it belongs to the user: packages are installed into it, and it is never removed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$(pwd -P)
stamp=.venv/.setup-stamp

say() { echo "setup.sh: $*" >&2; }
fail() { say "$*"; exit 1; }

# usable PYTHON MODULE...: it runs (a pyenv shim may not), its version is supported, and it has the modules.
usable() {
  "$1" -I -c 'import importlib, sys
assert (3, 11) <= sys.version_info[:2] <= (3, 14)
for module in sys.argv[1:]: importlib.import_module(module)' "${@:2}" </dev/null >/dev/null 2>&1
}

find_python() {
  while read -r python; do
    if usable "$python" venv ensurepip; then return; fi # Debian packages ensurepip separately
  done < <(if [ -n "${PYTHON:-}" ]; then echo "$PYTHON"; else
    type -aP python3.11 python3.12 python3.13 python3.14 python3 python; fi)
  fail "no Python 3.11 to 3.14 with venv and ensurepip (${PYTHON:-searched PATH}): install one" \
    "(Debian, Ubuntu: apt install python3-venv) or set PYTHON=/path/to/python3.11"
}

case ${1:-} in
  --deepspeed) extras=dev,deepspeed ;;
  '') extras=dev ;;
  *) fail "unknown argument $1: only --deepspeed is possible" ;;
esac
while read -r line; do
  if [ "$line" = dev,deepspeed ]; then extras=dev,deepspeed; fi # installed by an earlier call
done < <(cat "$stamp" 2>/dev/null)

requested_state() { echo "$root" && .venv/bin/python --version && cat pyproject.toml constraints.txt && echo "$extras"; }
up_to_date() { [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(requested_state 2>/dev/null)" ]; }

# Run a command in its own process group, so that an interruption ends its children too.
run() {
  set -m
  "$@" </dev/null >&2 &
  child=$!
  set +m
  wait "$child" || fail "failed: $*"
  child=''
}

clean_up() {
  if [ -n "$child" ]; then
    kill -INT -- "-$child" 2>/dev/null && wait "$child" || true # on SIGINT, pip removes its temporary files
  fi
  if [ -n "$new" ]; then rm -rf .venv; fi
}

if up_to_date; then exit 0; fi
if command -v flock >/dev/null; then # one setup at a time; the lock is on this file because .venv may be removed
  exec 9<run_scripts/setup.sh
  flock -n 9 || { say "waiting for another setup in this folder"; flock 9; }
  if up_to_date; then exit 0; fi
fi

if [ -f "$stamp" ] && { [ "$(head -n 1 "$stamp")" != "$root" ] || ! usable .venv/bin/python pip; }; then
  say "recreating .venv: its setup was interrupted, the folder was moved, or its Python was removed"
  rm -rf .venv
fi

child='' new=''
trap clean_up EXIT
for signal in HUP INT TERM; do
  # shellcheck disable=SC2064 # expand the number now
  trap "say interrupted; exit $((128 + $(kill -l "$signal")))" "$signal"
done

if [ ! -e .venv ] && [ ! -L .venv ]; then
  find_python
  say "creating .venv with $("$python" --version) (this downloads PyTorch and takes a minute or more)"
  new=yes
  mkdir .venv
  echo incomplete >"$stamp" # after SIGKILL or a power failure, the next call starts again
  run "$python" -m venv .venv
else
  usable .venv/bin/python pip || fail ".venv was not created by this script and lacks a Python 3.11 to 3.14 with pip:" \
    "move it away"
  say "updating .venv to the versions in constraints.txt"
  rm -f "$stamp" # if this fails, the next call tries again
fi

# The build backend is pinned too, so install it first and build without isolation.
pip_install=(.venv/bin/python -m pip install --quiet --quiet --constraint constraints.txt) # prints errors only
run "${pip_install[@]}" setuptools
run "${pip_install[@]}" --no-build-isolation --editable '.[dev]'
if [ "$extras" != dev ]; then
  # DeepSpeed is built here, and its build needs PyTorch. Its C++ operations are not built: training uses none of them.
  export DS_BUILD_OPS=0
  run "${pip_install[@]}" --no-build-isolation --editable ".[$extras]"
fi

requested_state >"$stamp"
new=''
