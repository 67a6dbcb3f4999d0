#!/bin/bash
# Run parts of `make gpu` on a machine without a network: tools/gpu/run.sh [PART ...] [--minutes N] (see README.md here).
#
# Modules are compiled when they are unpacked: the source of torchao has warnings, which pytest would raise as errors.
# Uses PYTHON, else .venv/bin/python, else python3. Wheels in .gpu-wheels (make gpu-wheels) are unpacked into a temporary
# directory first, where no .venv is used. The checkout itself is on PYTHONPATH, and not installed.
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-}"
if [ -z "$python" ]; then
    python=python3
    [ -x .venv/bin/python ] && python=.venv/bin/python
fi
if [ "$python" != .venv/bin/python ] && compgen -G '.gpu-wheels/*.whl' >/dev/null; then
    site="${GPU_SITE:-${TMPDIR:-/tmp}/ckpt-gpu-site}"
    "$python" -m pip install -q --no-index --no-deps --no-cache-dir --upgrade --target "$site" .gpu-wheels/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "$python" -m tools.gpu "$@"
