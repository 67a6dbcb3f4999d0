"""``ckpt env``: print what a bug report should contain: versions, devices, the machine. Needs no library to work."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import automodel_ckpt
from automodel_ckpt.base.python_child import start_python
from automodel_ckpt.base.units import size_text
from automodel_ckpt.checkpoint.files.ownership import file_system_of
from automodel_ckpt.checkpoint.saving.environment import version_of
from automodel_ckpt.cli.common.terminal import print_document, printable, table
from automodel_ckpt.cli.launch.node_resources import cores
from automodel_ckpt.config.tree.references import SECRET_NAME

_LIBRARIES = (
    "numpy",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "torch",
    "transformers",
    "datasets",
    "peft",
)
"""Libraries that are imported, in another process, to see whether they work."""
_EXTRAS = (
    "triton",
    "torchao",
    "bitsandbytes",
    "flash-attn",
    "liger-kernel",
    "accelerate",
    "pillow",
)
"""Distributions with a version that matters, if they are installed. They are not imported."""
_PREFIXES = (
    *("AUTOMODEL_CKPT_", "CUDA_", "CUBLAS_", "NCCL_", "GLOO_", "NVIDIA_", "TORCH", "PYTORCH_"),
    *("TRITON_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "OMP_", "MKL_", "SLURM_JOB", "PYTHON"),
    *("SLURM_NTASKS", "LD_LIBRARY_PATH", "LD_PRELOAD", "TMPDIR", "WORLD_SIZE", "VIRTUAL_ENV"),
)
"""The beginnings of the names of variables that affect training."""
_USER_IN_URL = re.compile(r"(\w://)[^/@\s]+@")
_IMPORT_SECONDS = 180.0
_COMMAND_SECONDS = 20.0
USAGE = """
Print versions, devices and facts about this machine for a bug report. Values of environment variables that look like
secrets are not shown.
"""


def run(arguments: argparse.Namespace) -> int:
    """Run ``ckpt env``. What cannot be determined is shown as an error; the exit code is 0."""
    document = describe_environment()
    lines = []
    for title, section in document.items():
        rows = [[f"  {name}", printable(_text(value))] for name, value in section.items()]
        lines += [f"{title}:", *(table(rows) if rows else ["  none"])]
    return print_document(arguments, document, lines)


def describe_environment() -> dict[str, dict[str, Any]]:
    """Describe the program, the libraries, the GPUs, the machine, the directory and the environment, by section."""
    facts: dict[str, dict[str, Callable[[], Any]]] = {
        "automodel_ckpt": {
            "version": lambda: automodel_ckpt.__version__,
            "commit": _commit,
            "location": lambda: str(Path(automodel_ckpt.__file__).parent),
            "python": lambda: f"{platform.python_version()} ({platform.python_implementation()})",
            "executable": lambda: sys.executable,
        },
        "libraries": {},
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
            "free": _free_space,
        },
    }
    document: dict[str, dict[str, Any]] = {}
    for title, section in facts.items():
        document[title] = {name: _attempt(determine) for name, determine in section.items()}
    installed = {name: version_of(name) for name in _EXTRAS}
    found = {name: version for name, version in installed.items() if version is not None}
    document["libraries"] = {**_imported(_LIBRARIES), **found}
    document["environment variables"] = shown_variables(os.environ)
    return document


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that affect training, sorted by name, without values that look like secrets."""
    shown = {}
    for name in sorted(environment):
        if not name.startswith(_PREFIXES):
            continue
        if SECRET_NAME.search(name):
            shown[name] = "(set, not shown)"
        else:
            shown[name] = _USER_IN_URL.sub(r"\1...@", environment[name])
    return shown


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
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "none"
    return str(value)


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


def _imported(names: Sequence[str]) -> dict[str, Any]:
    """Import each library in a process of its own, and return their versions or errors by name: one may crash."""
    probe = "automodel_ckpt.cli.commands.env_probe"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    started = {name: start_python(probe, name, **streams) for name in names}
    return {name: _answer(name, process) for name, process in started.items()}


def _answer(name: str, process: subprocess.Popen[bytes]) -> Any:
    """Return the version of a library, for torch also its build and its devices, or the error of its import."""
    try:
        output, _ = process.communicate(timeout=_IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    # A library may print other lines.
    records = [json.loads(line) for line in output.splitlines() if line.startswith(b'{"name": ')]
    if not records:
        return _failed_import(name, "the process ended during the import, or took too long")
    found = records[-1]
    del found["name"]
    if "error" in found:
        return _failed_import(name, found["error"])
    return found if len(found) > 1 else found["version"]


def _failed_import(name: str, error: str) -> str:
    version = version_of(name)
    if version is None:
        return "not installed" if "No module named" in error else f"error: {error}"
    return f"error: {version} is installed, but cannot be imported: {error}"


def _driver() -> list[str] | None:
    """Return name, memory and driver version of each NVIDIA GPU; None without the driver's program."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    return _output(
        program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
    ).splitlines()


def _free_space() -> str:
    usage = shutil.disk_usage(".")
    return f"{size_text(usage.free)} of {size_text(usage.total)}"
