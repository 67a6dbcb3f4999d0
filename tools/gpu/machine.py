"""What the figures depend on: versions of packages, and the GPU."""

import os
import platform
import subprocess
import time
from contextlib import suppress
from importlib import metadata

from tools.support import ROOT


def version_of(distribution: str) -> str | None:
    """Returns None when the distribution is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return None


def output_of(*command: str) -> str:
    """The first line that a command prints; empty if it fails or is not installed."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else ""


def describe() -> dict[str, str | None]:
    """Describe this machine and its software. Does not import torch, and so cannot initialize CUDA."""
    system = os.uname()
    # The settings of the GPU are only read.
    fields = "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": output_of("git", "rev-parse", "--short=12", "HEAD"),
        "gpu": output_of("nvidia-smi", fields, "--format=csv,noheader"),
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "transformers": version_of("transformers"),
        "peft": version_of("peft"),
        "kernel": f"{system.sysname} {system.release}",
    }
