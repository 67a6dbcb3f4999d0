"""Virtual environments for other programs: one directory each, made anew when what it should hold has changed."""

import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

TORCH = "torch==2.13.0"
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_GPU_LIBRARIES = ("torch", "torchaudio", "torchvision", "torchcodec")


def python_of(steps: Sequence[str], without_gpu: str, directory: Path) -> Path:
    """The interpreter of an environment, made in *directory* where it is not there yet.

    Args:
        steps: The arguments of the calls of ``pip install``, in order.
        without_gpu: An installed package, or an empty text. Its requirements are installed last, apart from libraries
            of GPUs.
        directory: The directory of the environment.

    Raises:
        subprocess.CalledProcessError: Something cannot be installed.
    """
    python, stamp = directory / "bin" / "python", directory / ".ready"
    key = repr((sys.version, steps, without_gpu))
    if stamp.is_file() and stamp.read_text() == key:
        return python
    print(f"  installing {directory.name} in {directory}", flush=True)
    shutil.rmtree(directory, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    for step in steps:
        _install(python, *_torch_source(step), *step.split())
    if without_gpu:
        code = "import sys; from importlib.metadata import requires; print(*requires(sys.argv[1]), sep='\\n')"
        needed = [text for text in asked(python, code, without_gpu) if "extra ==" not in text]
        names = [re.split(r"[^a-z0-9._-]", text.lower())[0] for text in needed]
        pairs = zip(names, needed, strict=True)
        _install(python, *(text for name, text in pairs if name not in _GPU_LIBRARIES))
    stamp.write_text(key)
    return python


def _install(python: Path, *arguments: str) -> None:
    command = ["nice", str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments], check=True, env=own_variables())


def own_variables() -> dict[str, str]:
    """This process's environment without what would lead another interpreter to this one's packages."""
    hidden = ("PYTHONPATH", "PYTHONHOME")
    return {name: value for name, value in os.environ.items() if name not in hidden}


def asked(python: Path, code: str, *arguments: str) -> list[str]:
    """The lines that another interpreter prints for *code*."""
    command = [str(python), "-c", code, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=own_variables())
    return done.stdout.splitlines()


def _torch_source(step: str) -> list[str]:
    """Torch's own index of CPU builds where it can be reached; else pip's configuration has to know one."""
    if not step.startswith("torch=="):
        return []
    try:
        with urllib.request.urlopen(f"{_CPU_INDEX}/torch/", timeout=10):
            return ["--extra-index-url", _CPU_INDEX]
    except OSError:
        return []
