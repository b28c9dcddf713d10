#!/usr/bin/env bash
# Make .venv: the pinned packages of constraints.txt, and this project as an editable install.
#
#   bash run_scripts/setup.sh                           once; again, it takes a fraction of a second
#   PYTHON=/path/to/python3.12 bash run_scripts/setup.sh   with a Python of your choice
#
# .venv/.setup-stamp says what .venv is: line 1 the folder it was made in (a venv can't be moved), or "half-made";
# line 2 a fingerprint of what was installed. A .venv without it is the user's own: installed into, never removed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$(pwd -P)
stamp=.venv/.setup-stamp
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { echo "setup.sh: $*" >&2; }
fail() { say "$*"; exit 1; }

# suits PYTHON MODULE…: it runs (a pyenv shim may not), the pins support its version, and it has the modules.
suits() {
  "$1" -I -c 'import importlib, sys
assert (3, 11) <= sys.version_info[:2] <= (3, 14)
for module in sys.argv[1:]: importlib.import_module(module)' "${@:2}" </dev/null >/dev/null 2>&1
}

# The first Python that suits; 3.11 is the one that the project is tested with. Debian's may lack ensurepip.
find_python() {
  if [ -n "${PYTHON:-}" ]; then
    suits "$PYTHON" venv ensurepip && echo "$PYTHON"
    return
  fi
  while read -r candidate; do
    suits "$candidate" venv ensurepip && echo "$candidate" && return
  done < <(type -aP python3.11 python3.12 python3.13 python3.14 python3 python)
  return 1
}

fingerprint() {
  .venv/bin/python -I -c 'import hashlib, pathlib, sys
content = b"\0".join(pathlib.Path(name).read_bytes() for name in sys.argv[1:])
print(hashlib.sha256(sys.version.encode() + content).hexdigest())' pyproject.toml constraints.txt 2>/dev/null
}

up_to_date() { [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$root"$'\n'"$(fingerprint)" ]; }

# step WHAT COMMAND…: run it quietly; where it fails, say so with its last lines.
step() {
  set -m # a process group of its own, so that leave() ends the command with all its children
  TMPDIR=$scratch "${@:2}" </dev/null >"$scratch/log" 2>&1 &
  child=$!
  set +m
  wait "$child" || fail "$1 failed; the last lines:"$'\n'"$(tail -n 5 "$scratch/log")"
  child=
}

leave() {
  if [ -n "$child" ]; then
    kill -TERM -- "-$child" 2>/dev/null && wait "$child" || true
  fi
  if [ -n "$new" ]; then
    rm -rf .venv
  fi
  rm -rf "$scratch"
}

if up_to_date; then exit 0; fi
if command -v flock >/dev/null; then # one set-up at a time; the lock lies on this script, outside .venv
  exec 9<run_scripts/setup.sh
  flock -n 9 || { say "waiting for another set-up of this folder"; flock 9; }
  if up_to_date; then exit 0; fi
fi

if [ -f "$stamp" ] && { [ "$(head -n 1 "$stamp")" != "$root" ] || ! suits .venv/bin/python pip; }; then
  say "making .venv anew: it was left half-made, was moved here, or lost its Python"
  rm -rf .venv
fi

child= new='' scratch=$(mktemp -d)
trap leave EXIT
trap 'say interrupted; exit 129' HUP
trap 'say interrupted; exit 130' INT
trap 'say interrupted; exit 143' TERM

if [ ! -e .venv ] && [ ! -L .venv ]; then
  python=$(find_python) || fail "no Python 3.11 to 3.14 with venv and ensurepip at ${PYTHON:-any place on PATH}:" \
    "install one (Debian, Ubuntu: apt install python3-venv) or name it, PYTHON=/path/to/python3.11"
  say "setting up .venv with $("$python" --version 2>&1) (a minute or more: it downloads PyTorch)"
  new=yes
  mkdir .venv
  echo half-made >"$stamp"
  step "making .venv" "$python" -m venv .venv
else
  suits .venv/bin/python pip || fail ".venv is not of my making and lacks a Python 3.11 to 3.14 with pip: move it away"
  say "bringing .venv to the versions of constraints.txt"
  rm -f "$stamp" # until it is done, so that the next call tries again
fi

# The build backend is pinned too, so it is installed here and not into an isolated build environment.
pip_install=(.venv/bin/python -m pip install --quiet --constraint constraints.txt)
step "installing setuptools" "${pip_install[@]}" setuptools
step "installing the packages" "${pip_install[@]}" --no-build-isolation --editable '.[dev]'

printf '%s\n%s\n' "$root" "$(fingerprint)" >"$stamp"
new=''
