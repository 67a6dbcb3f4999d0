"""tools/null_cuda without torch for CUDA: what the build generates, its errors, and the environment of a command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.null_cuda import __main__ as null_cuda
from tools.null_cuda.build import CannotBuild, build, missing_stubs, without_cpp_types


def test_each_missing_function_of_cuda_returns_0_and_no_other_is_generated() -> None:
    undefined = [
        "cudaMalloc",
        "cublasSgemm_v2",
        "ncclSend",
        "cusolverDnCreate",
        "malloc",
        "cudaFree",
    ]
    source = missing_stubs(undefined, defined=["cudaMalloc", "cuInit"])
    for name in ("cublasSgemm_v2", "ncclSend", "cudaFree", "cuLaunchKernel"):
        assert source.count(f"int {name}(void) {{ return 0; }}") == 1
    for name in ("cudaMalloc", "cuInit", "cusolverDnCreate", " malloc"):
        assert f"{name}(" not in source


def test_the_header_of_nccl_keeps_all_but_types_of_cpp() -> None:
    header = "#include <cuda_runtime.h>\n#include <cuda_fp16.h>\n  #include <cuda_fp8.h>\n#include <limits.h>\n"
    assert without_cpp_types(header) == "#include <cuda_runtime.h>\n#include <limits.h>\n"


def test_an_environment_without_the_packages_is_an_error_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "lib/python3.12/site-packages/torch").mkdir(parents=True)
    with pytest.raises(CannotBuild, match=r"no triton.*nccl\.h\n  hint: .*make null-cuda"):
        build(tmp_path, tmp_path / "build")


def test_a_command_without_an_environment_ends_with_a_hint(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tools.null_cuda", "--venv", str(tmp_path), "--", "true"]
    root = Path(__file__).parents[2]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "hint:" in done.stderr and "make null-cuda" in done.stderr


def test_the_options_select_what_a_command_imports_first(tmp_path: Path) -> None:
    library = tmp_path / "libcuda.so.1"
    words = ["--venv", str(tmp_path), "--", "python", "-V"]
    plain = null_cuda.environment(null_cuda.parser().parse_args(words), library)
    assert plain["NULL_CUDA_PROBES"] == "1" and "NULL_CUDA_REAL" not in plain
    assert plain["TRITON_LIBCUDA_PATH"] == str(tmp_path)
    assert plain["LD_LIBRARY_PATH"].split(":")[0] == str(tmp_path / "nvml")
    options = ["--arithmetic", "--no-triton", "--no-nvml", "--gib", "8", *words]
    right = null_cuda.environment(null_cuda.parser().parse_args(options), library)
    assert right["NULL_CUDA_REAL"] == right["NULL_NO_TRITON"] == "1"
    assert right["NULL_CUDA_GIB"] == "8.0"
    assert str(tmp_path / "nvml") not in right.get("LD_LIBRARY_PATH", "")
    assert "TRITON_LIBCUDA_PATH" not in right and "NULL_CUDA_PROBES" not in right
