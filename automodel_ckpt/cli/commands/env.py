"""``ckpt env``: print what a bug report should contain: versions, devices, the machine. Needs no library to work."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import automodel_ckpt
from automodel_ckpt.base.durable_io import file_system_of, free_bytes
from automodel_ckpt.base.python_child import start_python
from automodel_ckpt.base.store_url import scrubbed
from automodel_ckpt.base.units import size_text
from automodel_ckpt.base.version import version_of
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict
from automodel_ckpt.cli.common.output import print_document, table
from automodel_ckpt.cli.launch.node_resources import cores
from automodel_ckpt.config.tree.references import SECRET_NAME
from automodel_ckpt.errors import printable

# Distributions with a version that matters. They are not imported.
_LIBRARIES = """
numpy safetensors tokenizers huggingface_hub torch transformers datasets peft triton torchao bitsandbytes flash-attn
liger-kernel accelerate pillow
"""
_PROBE = "automodel_ckpt.cli.commands.env_probe"
# The beginnings of the names of variables that affect training.
_PREFIXES = (
    *("AUTOMODEL_CKPT_", "CUDA_", "CUBLAS_", "NCCL_", "GLOO_", "NVIDIA_", "TORCH", "PYTORCH_"),
    *("TRITON_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "OMP_", "MKL_", "SLURM_JOB", "PYTHON"),
    *("SLURM_NTASKS", "LD_LIBRARY_PATH", "LD_PRELOAD", "TMPDIR", "WORLD_SIZE", "VIRTUAL_ENV"),
)
_IMPORT_SECONDS = 180.0
_COMMAND_SECONDS = 20.0
USAGE = """
Print versions, devices and facts about this machine for a bug report. Values of environment variables that look like
secrets are not shown.
"""


def run(arguments: Namespace) -> int:
    """Run ``ckpt env``. What cannot be determined is shown as an error; the exit code is 0."""
    document = describe_environment()
    lines = []
    for title, section in document.items():
        rows = [[f"  {name}", printable(_text(value))] for name, value in section.items()]
        lines += [f"{title}:", *(table(rows) if rows else ["  none"])]
    return print_document(arguments, document, lines)


def describe_environment() -> dict[str, ValueDict]:
    """Describe the program, the libraries, the GPUs, the machine, the directory and the environment, by section."""
    facts: dict[str, dict[str, Callable[[], Any]]] = {
        "automodel_ckpt": {
            "version": lambda: automodel_ckpt.__version__,
            "commit": _commit,
            "location": lambda: str(Path(automodel_ckpt.__file__).parent),
            "python": lambda: f"{platform.python_version()} ({platform.python_implementation()})",
            "executable": lambda: sys.executable,
        },
        "libraries": {name: partial(version_of, name) for name in _LIBRARIES.split()},
        "torch": {"build and devices": _torch},
        "gpu": {"driver": _driver},
        "machine": {
            "system": lambda: platform.freedesktop_os_release()["PRETTY_NAME"],
            "kernel": lambda: f"{platform.system()} {platform.release()} {platform.machine()}",
            "libc": lambda: " ".join(platform.libc_ver()) or None,
            "cpus": lambda: f"{os.cpu_count()}, of which this process may use {cores()}",
            "memory": lambda: size_text(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        },
        "current directory": {
            "path": os.getcwd,
            "file system": lambda: file_system_of(Path.cwd()),
            "free": lambda: size_text(free_bytes(Path.cwd())),
        },
    }
    document: dict[str, ValueDict] = {
        title: {name: _attempt(determine) for name, determine in section.items()}
        for title, section in facts.items()
    }
    # Those that affect training, without values that look like secrets.
    document["environment variables"] = {
        name: "(set, not shown)" if SECRET_NAME.search(name) else scrubbed(value)
        for name, value in sorted(os.environ.items())
        if name.startswith(_PREFIXES)
    }
    return document


def _attempt(determine: Callable[[], Any]) -> Any:
    """Call *determine*; if it fails, return the error as text, because the rest of the report is still useful."""
    try:
        return determine()
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items() if item is not None)
    return ", ".join(map(_text, value)) or "none" if isinstance(value, list) else str(value)


def _output(*command: str) -> str:
    """Run a command and return its output. Raises RuntimeError with its error output if it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"exit code {done.returncode}")
    return done.stdout.strip()


def _commit() -> str | None:
    """Return the commit of this package's checkout, and whether files were changed.

    Returns None when it is installed.
    """
    root = Path(automodel_ckpt.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return f"{commit} with local changes" if changed else commit


def _torch() -> Any:
    """Import torch in another process, which may crash or take long, and return its build and its devices.

    Raises RuntimeError with the last line of the process's errors, and TimeoutExpired.
    """
    process = start_python(_PROBE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, errors = process.communicate(timeout=_IMPORT_SECONDS)
    finally:
        process.kill()
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit code {process.returncode}")
    # A library may print other lines.
    return json.loads(output.splitlines()[-1])


def _driver() -> list[str] | None:
    """Return name, memory and driver version of each NVIDIA GPU; None without the driver's program."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    return _output(
        program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
    ).splitlines()
