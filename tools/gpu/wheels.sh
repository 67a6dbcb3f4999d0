#!/bin/bash
# Download what the reference machine lacks into .gpu-wheels, so that it can be carried there: make gpu-wheels.
#
# The machine has Python 3.12 on x86-64, torch and transformers, and no network. With the files of the repository, the
# folder, which git ignores, must stay below the 64 MiB that travel. Uses PYTHON, else .venv/bin/python.
set -euo pipefail
cd "$(dirname "$0")/../.."
python="$(realpath -s "${PYTHON:-.venv/bin/python}")"
# The last ones are optional: QLoRA, 8-bit optimizers and FP8, and other programs' loss heads to compare with. datasets
# imports pandas; the list of what is on the machine does not name it.
pins="datasets==5.2.0 dill==0.4.1 httpx==0.28.1 multiprocess==0.70.19 omegaconf==2.4.0 python-dateutil==4.0.0
    pandas==3.1.1 bitsandbytes==0.50.2 cut-cross-entropy==25.1.1 liger-kernel==0.8.5 torchao==0.18.0"
cuda=libbitsandbytes_cuda130.so
rm -rf .gpu-wheels
mkdir .gpu-wheels
platforms=()
for version in 2_28 2_27 2_24 2_17; do
    platforms+=(--platform "manylinux_${version}_x86_64")
done
# Without dependencies: the others are on the machine.
# shellcheck disable=SC2086
"$python" -m pip download -q --no-deps -d .gpu-wheels --only-binary=:all: --python-version 3.12 \
    --implementation cp "${platforms[@]}" $pins
# The libraries of bitsandbytes for other versions of CUDA are most of its wheel. pip does not compare the list of files
# in a wheel with its content when it installs.
wheel="$(echo "$PWD"/.gpu-wheels/bitsandbytes-*.whl)"
unpacked="$(mktemp -d)"
trap 'rm -rf "$unpacked"' EXIT
"$python" -m zipfile -e "$wheel" "$unpacked"
find "$unpacked" -name '*.so' ! -name '*_cpu*' ! -name "$cuda" -delete
rm "$wheel"
(cd "$unpacked" && "$python" -m zipfile -c "$wheel" ./*)
carried="$(du -sm .gpu-wheels | cut -f1)"
listed="$(git ls-files -z | xargs -0 du -cm --apparent-size | awk '$2 == "total" { sum += $1 } END { print sum }')"
echo ".gpu-wheels: $carried MiB, with the repository $((carried + listed)) MiB"
if [ $((carried + listed)) -gt 64 ]; then
    echo "too large to be carried: remove the wheel of an optional package"
    exit 1
fi
