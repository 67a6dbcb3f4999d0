"""What this machine has and lacks: versions, packages, the GPU, a compiler, pinned memory, memory and disk."""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import time
from pathlib import Path

from tools.gpu.machine import NEEDED, OPTIONAL, nvidia_smi, versions
from tools.gpu.parts.ceilings import register
from tools.gpu.session import Figures, PartRun

_DISK_BYTES = 2 << 30
_PINNED_BYTES = 1 << 30
_BLOCK = 64 << 20


def run(part: PartRun) -> None:
    """Look at everything that a later part needs. Nothing here stops the others."""
    session = part.session
    needed, optional = versions(NEEDED), versions(OPTIONAL)
    part.results.add("needed packages", needed)
    part.results.add("optional packages", optional)
    missing = [name for name, version in needed.items() if version is None]
    part.results.add("missing packages", {"names": missing, "count": len(missing)})
    if missing:
        print(f"    MISSING: {', '.join(missing)} (make gpu-wheels, and carry .gpu-wheels)")
    part.measure("program", _program, limit=90)
    part.measure("device", _device, session.device, limit=90)
    part.measure("compiler", _compiler, session.device, limit=120)
    size = 1 << 20 if session.is_dry_run else _PINNED_BYTES
    part.measure("pinned memory", _pinned_memory, size, limit=60)
    size = 1 << 20 if session.is_dry_run else _DISK_BYTES
    part.measure("disk", _disk, session.scratch, size, limit=60)


def _program() -> Figures:
    """The command answers, and lists its examples."""
    import contextlib
    import io

    from automodel_ckpt.cli.train import main

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = main(["--version"])
    yield "program", {"exit_code": code, "version": text.getvalue().strip()}


def _device(device: str) -> Figures:
    import torch

    yield (
        "torch",
        {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "devices": torch.cuda.device_count(),
            "tf32": torch.backends.cuda.matmul.allow_tf32,
            "varlen_attention": _has("torch.nn.attention.varlen"),
            "nvidia_smi": nvidia_smi("name,driver_version,clocks.sm,clocks.mem,temperature.gpu"),
        },
    )
    if device != "cuda":
        return
    found = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    yield (
        "device",
        {
            "name": found.name,
            "capability": f"{found.major}.{found.minor}",
            "multiprocessors": found.multi_processor_count,
            "free_bytes": free,
            "total_bytes": total,
            "bfloat16": torch.cuda.is_bf16_supported(),
        },
    )


def _has(module: str) -> bool:
    import importlib

    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _compiler(device: str) -> Figures:
    """torch.compile of a small function: inductor on the GPU (Triton), aot_eager without one."""
    import torch

    backend = "inductor" if device == "cuda" else "aot_eager"
    started = time.perf_counter()
    compiled = torch.compile(lambda x: torch.nn.functional.gelu(x) * 2, backend=backend)
    given = torch.randn(1024, device=device)
    difference = (compiled(given) - torch.nn.functional.gelu(given) * 2).abs().max()
    seconds = time.perf_counter() - started
    programs = {name: shutil.which(name) or "" for name in ("gcc", "g++", "cc", "nvcc", "ninja")}
    yield (
        "compiler",
        {"backend": backend, "seconds": seconds, "difference": float(difference), **programs},
    )


def _pinned_memory(nbytes: int) -> Figures:
    """Limits on locked memory, and whether memory of a memfd, as asynchronous saves use it, can be registered."""
    import torch

    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield "memory limits", {"memlock_soft": soft, "memlock_hard": hard}
    if not torch.cuda.is_available():
        return
    descriptor = os.memfd_create("gpu-preflight")
    os.ftruncate(descriptor, nbytes)
    mapped = mmap.mmap(descriptor, nbytes)
    tensor = torch.frombuffer(memoryview(mapped), dtype=torch.uint8)
    tensor.zero_()
    started = time.perf_counter()
    status = register(tensor)
    seconds = time.perf_counter() - started
    gigabytes_per_second = nbytes / 1e9 / seconds
    yield (
        "pinned memory",
        {"status": status, "seconds": seconds, "gb_per_second": gigabytes_per_second},
    )


def _disk(directory: Path, nbytes: int) -> Figures:
    """Seconds to write and fsync a file where the models and checkpoints of the other parts go."""
    block = os.urandom(1 << 20) * max(min(_BLOCK, nbytes) >> 20, 1)
    path = directory / "disk-test"
    started = time.perf_counter()
    with open(path, "wb") as file:
        for _ in range(max(nbytes // len(block), 1)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    written = path.stat().st_size
    path.unlink()
    free = shutil.disk_usage(directory).free
    yield (
        "disk",
        {"gb_per_second": written / 1e9 / seconds, "seconds": seconds, "free_bytes": free},
    )
