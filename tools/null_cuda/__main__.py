"""Run a command with a CUDA device that needs no hardware: ``python -m tools.null_cuda [OPTIONS] -- COMMAND...``

``python`` in COMMAND is that of the CUDA environment. tools/null_cuda/README.md describes what such a run shows.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tools.null_cuda.build import CannotBuild, build

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).parent / "site"


def environment(options: argparse.Namespace, library: Path) -> dict[str, str]:
    """The variables of the command, as in tools/null_cuda/README.md."""
    found = dict(os.environ)
    paths = [str(SITE), str(ROOT), found.get("PYTHONPATH", "")]
    found["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    found["PATH"] = os.pathsep.join([str(options.venv / "bin"), found.get("PATH", os.defpath)])
    found["LD_PRELOAD"] = str(library)
    if not options.no_nvml:
        libraries = [str(library.parent / "nvml"), found.get("LD_LIBRARY_PATH", "")]
        found["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in libraries if path)
    found["TORCH_CUDNN_SDPA_DEPRIORITIZED"] = "1"
    found["NULL_CUDA_GIB"] = str(options.gib)
    found.setdefault("HF_HUB_OFFLINE", "1")
    found.setdefault("OMP_NUM_THREADS", "1")
    found["NULL_CUDA_REAL" if options.arithmetic else "NULL_CUDA_PROBES"] = "1"
    if not options.arithmetic:
        # Of the number of images, for example.
        found["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"
    if options.no_triton:
        found["NULL_NO_TRITON"] = "1"
    else:
        found["TRITON_LIBCUDA_PATH"] = str(library.parent)
        if options.arithmetic:
            found.setdefault("TRITON_INTERPRET", "1")
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tools.null_cuda", description=__doc__)
    made.add_argument("--arithmetic", action="store_true", help="compute operators on the CPU")
    made.add_argument(
        "--no-triton", action="store_true", help="hide Triton, whose kernels do nothing"
    )
    made.add_argument("--no-nvml", action="store_true", help="a container without NVML")
    made.add_argument(
        "--gib", type=float, default=139.8, help="memory of the device in GiB (139.8)"
    )
    made.add_argument(
        "--venv", type=Path, default=ROOT / ".null-cuda", help="environment with torch for CUDA"
    )
    made.add_argument("--build", type=Path, help="directory of the library (VENV/null-cuda)")
    made.add_argument("command", nargs="+")
    return made


def main() -> None:
    options = parser().parse_args()
    # Without resolve(): python in an environment is a link to the one outside of it.
    options.venv = options.venv.absolute()
    try:
        library = build(options.venv, (options.build or options.venv / "null-cuda").absolute())
    except CannotBuild as error:
        sys.exit(f"error: {error}")
    variables = environment(options, library)
    os.environ["PATH"] = variables["PATH"]
    os.execvpe(options.command[0], options.command, variables)


if __name__ == "__main__":
    main()
