#!/usr/bin/env bash
# Make or update a virtual environment that the Makefile uses: tools/setup_venv.sh [DIRECTORY [CONSTRAINTS [EXTRAS [PACKAGE ...]]]]
#
# Installs this repository (editable) with what its tests and checks need, in the versions of constraints.txt or of the
# given file.
# On a machine without an NVIDIA GPU torch's CPU build is taken, a tenth of the size of the CUDA one.
# PYTHON names the interpreter to build from; by default the first Python >= 3.11 that can make an environment.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:-.venv}
constraints=${2:-constraints.txt}
extras=${3:-test,check}
cpu_index=https://download.pytorch.org/whl/cpu

works() { "$1" -m pip --version >/dev/null 2>&1; }

make_venv() {
    local python
    for python in ${PYTHON:-python3 /usr/bin/python3 python3.13 python3.12 python3.11}; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        "$python" -m venv --clear "$venv" >/dev/null 2>&1 && works "$venv/bin/python" && return
    done
    echo "error: no Python >= 3.11 here can make a virtual environment (tried: ${PYTHON:-python3, /usr/bin/python3, python3.13 ...})" >&2
    echo "  hint:   install one with its venv module (Debian: apt install python3-venv), or name it: make PYTHON=/path/to/python3" >&2
    return 1
}

# A wheel of the constrained version that pip finds without an index (PIP_FIND_LINKS, pip.conf) needs no other source.
has_local_torch() { "$venv/bin/python" -m pip install --quiet --dry-run --no-index --no-deps -c "$constraints" torch 2>/dev/null; }

reachable() {
    "$venv/bin/python" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=10)' "$1/torch/" 2>/dev/null
}

torch_source() {
    if nvidia-smi >/dev/null 2>&1 || has_local_torch || ! reachable "$cpu_index"; then
        return
    fi
    echo "--extra-index-url=$cpu_index"
}

works "$venv/bin/python" || make_venv
# shellcheck disable=SC2046  # no source means no argument
"$venv/bin/python" -m pip install --disable-pip-version-check -c "$constraints" $(torch_source) -e ".[$extras]" "${@:4}"
