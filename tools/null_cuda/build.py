"""Build the CUDA library without a device: ``python -m tools.null_cuda.build VENV DIRECTORY``.

VENV has torch for CUDA with the headers of its packages. DIRECTORY gets ``libcuda.so.1`` and what it is made from, and
``nvml/libnvidia-ml.so.1``.
"""

from __future__ import annotations

import argparse
import fcntl
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = ("-fPIC", "-O1", "-w")
LIBRARIES = ("torch_cuda", "c10_cuda", "torch_cuda_linalg", "torch_python", "torch_nvshmem")
GENERATED = re.compile(r"cublas|cuda[A-Z]|__cuda[A-Z]|nccl[A-Z]")
"""The functions that may be generated; others are those of libraries that are loaded, such as cuSOLVER."""
DRIVER = (
    "cuInit", "cuCtxSetCurrent", "cuCtxPushCurrent_v2", "cuMemSetAccess", "cuModuleUnload", "cuFuncSetAttribute",
    "cuFuncSetCacheConfig", "cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel", "cuStreamSynchronize",
    "cuCtxSetLimit", "cuTensorMapEncodeTiled",
)  # fmt: skip
"""Functions of the driver that only have to succeed. Programs ask for them by name, so no library lists them."""


class CannotBuild(Exception):
    """What is missing, and a hint."""


def missing_stubs(undefined: Iterable[str], defined: Iterable[str]) -> str:
    """C source with a function that returns 0 for each name in *undefined* that is not in *defined*."""
    names = {name for name in undefined if GENERATED.match(name)}
    missing = sorted((names | set(DRIVER)) - set(defined))
    return "".join(f"int {name}(void) {{ return 0; }}\n" for name in missing)


def without_cpp_types(header: str) -> str:
    """NCCL's header without the headers of types that only C++ can read."""
    return re.sub(r"^\s*#include <cuda_(fp16|bf16|fp8)\.h>\n", "", header, flags=re.MULTILINE)


def build(venv: Path, directory: Path) -> Path:
    """Build the library in *directory*, unless it is there and up to date, and return its path.

    Another process that builds it meanwhile is waited for. Raises CannotBuild if a compiler or a package is missing, or
    if gcc fails.
    """
    library = directory / "libcuda.so.1"
    if _is_current(library):
        return library
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_current(library):
            _build(venv, directory, library)
    return library


def _is_current(library: Path) -> bool:
    """Whether *library* is there and newer than its sources."""
    sources = SOURCES.glob("*.[chp]*")
    return library.exists() and all(_is_older(path, library) for path in sources)


def _build(venv: Path, directory: Path, library: Path) -> None:
    packages = _packages_of(venv)
    for tool in ("gcc", "nm"):
        if shutil.which(tool) is None:
            raise CannotBuild(f"{tool} is not installed\n  hint:   apt install gcc binutils")
    (directory / "include").mkdir(parents=True, exist_ok=True)
    header = (packages / "nvidia/nccl/include/nccl.h").read_text()
    (directory / "include" / "nccl.h").write_text(without_cpp_types(header))
    includes = [
        f"-I{packages}/nvidia/cu13/include",
        f"-I{directory}/include",
        "-idirafter",
        f"{packages}/triton/backends/nvidia/include",
    ]
    objects = []
    for name in ("memory", "runtime", "driver", "nccl"):
        objects.append(directory / f"{name}.o")
        _run(
            "gcc",
            "-c",
            *FLAGS,
            "-fvisibility=hidden",
            *includes,
            "-o",
            objects[-1],
            SOURCES / f"{name}.c",
        )
    nvml = directory / "nvml"
    nvml.mkdir(exist_ok=True)
    _run("gcc", "-shared", *FLAGS, "-o", nvml / "libnvidia-ml.so.1", SOURCES / "nvml.c")
    torch = [packages / "torch" / "lib" / f"lib{name}.so" for name in LIBRARIES]
    undefined = _symbols("--undefined-only", torch)
    defined = _symbols("--defined-only", objects, dynamic=False)
    stubs = directory / "stubs.c"
    stubs.write_text(missing_stubs(undefined, defined))
    # A process that starts meanwhile must not load half a library.
    partial = directory / "libcuda.partial"
    _run(
        "gcc", "-shared", *FLAGS, "-o", partial, "-Wl,-soname,libcuda.so.1", *objects, stubs, "-ldl",
        "-lpthread",
    )  # fmt: skip
    partial.replace(library)
    # Triton links with -lcuda.
    (directory / "libcuda.so").unlink(missing_ok=True)
    (directory / "libcuda.so").symlink_to(library.name)


def _is_older(path: Path, than: Path) -> bool:
    return path.stat().st_mtime <= than.stat().st_mtime


def _packages_of(venv: Path) -> Path:
    """The site-packages of *venv*, if the packages with the headers are there."""
    needed = (
        "torch",
        "triton/backends/nvidia/include",
        "nvidia/cu13/include",
        "nvidia/nccl/include/nccl.h",
    )
    for packages in venv.glob("lib/python3*/site-packages"):
        absent = [name for name in needed if not (packages / name).exists()]
        if absent:
            raise CannotBuild(
                f"{packages} has no {', '.join(absent)}\n"
                "  hint:   install torch 2.11 or later for CUDA 13 there, or run `make null-cuda`"
            )
        return packages
    raise CannotBuild(f"{venv} is no virtual environment\n  hint:   run `make null-cuda`")


def _symbols(which: str, files: Iterable[Path], dynamic: bool = True) -> list[str]:
    """Names of functions that *files* define or lack, without versions."""
    kind = ["--dynamic"] if dynamic else []
    lines = _run("nm", *kind, which, *files).splitlines()
    return [line.split()[-1].partition("@")[0] for line in lines if len(line.split()) > 1]


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        first = "\n".join(done.stderr.splitlines()[:20])
        raise CannotBuild(
            f"{command[0]} failed:\n{first}\n  hint:   the environment needs torch 2.11 or later for CUDA 13"
        )
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venv", type=Path)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    try:
        print(build(options.venv, options.directory))
    except CannotBuild as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
