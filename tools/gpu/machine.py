"""What the figures depend on: versions of packages, the GPU, the processor, memory and disk."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from tools.support import ROOT


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def git_commit() -> str:
    """The commit of the working tree; empty where the tree was copied without its repository, and without git."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def describe(scratch: Path) -> dict[str, Any]:
    """Describe this machine and its software. Does not import torch, and so cannot initialize CUDA."""
    system = os.uname()
    memory = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        memory[name] = int(value.split()[0]) * 1024
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": git_commit(),
        "gpu": nvidia_smi("name,driver_version,memory.total,clocks.sm,clocks.mem"),
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "transformers": version_of("transformers"),
        "peft": version_of("peft"),
        "kernel": f"{system.sysname} {system.release}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory["MemTotal"],
        "free_memory_bytes": memory["MemAvailable"],
        "free_disk_bytes": shutil.disk_usage(scratch).free,
    }


def nvidia_smi(fields: str) -> str:
    """What nvidia-smi reports about the first GPU; empty without a GPU. The settings are only read."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return ""
    lines = done.stdout.splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else ""
