"""Virtual environments for other programs: one directory each, made anew when what it should hold has changed."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Environment:
    """What to install, in order: requirements with spaces between them, by a call of pip each; *loose* ones without
    dependencies.

    *without* names requirements of the loose ones that are left out (GPU libraries, media codecs); all others of
    theirs are installed, unless they come *loose_alone*.
    """

    first: str = ""
    loose: str = ""
    then: str = ""
    without: frozenset[str] = frozenset()
    loose_alone: bool = False

    @property
    def key(self) -> str:
        return hashlib.sha256(repr((sys.version, self)).encode()).hexdigest()


def python_of(environment: Environment, directory: Path) -> Path:
    """The interpreter of *environment*, made in *directory* where it is not there yet.

    Raises subprocess.CalledProcessError where something cannot be installed.
    """
    python, stamp = directory / "bin" / "python", directory / ".ready"
    if stamp.is_file() and stamp.read_text() == environment.key:
        return python
    print(f"  installing {directory.name} in {directory}", flush=True)
    shutil.rmtree(directory, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    first = environment.first.split()
    _install(python, first, *_torch_source(first))
    _install(python, environment.loose.split(), "--no-deps")
    _install(python, _requirements_of(python, environment))
    _install(python, environment.then.split())
    stamp.write_text(environment.key)
    return python


def _install(python: Path, requirements: Sequence[str], *options: str) -> None:
    if requirements:
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        words = ["nice", *command, *options, *requirements]
        subprocess.run(words, check=True, env=own_variables())


def own_variables() -> dict[str, str]:
    """This process's environment without what would lead another interpreter to this one's packages."""
    hidden = ("PYTHONPATH", "PYTHONHOME")
    return {name: value for name, value in os.environ.items() if name not in hidden}


def asked(python: Path, code: str, *arguments: str) -> list[str]:
    """The lines that another interpreter prints for *code*."""
    command = [str(python), "-c", code, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=own_variables())
    return done.stdout.splitlines()


def _torch_source(requirements: Sequence[str]) -> list[str]:
    """Torch's own index of CPU builds where it can be reached; else pip's configuration has to know one."""
    if not any(requirement.startswith("torch") for requirement in requirements):
        return []
    try:
        with urllib.request.urlopen(f"{_CPU_INDEX}/torch/", timeout=10):
            return ["--extra-index-url", _CPU_INDEX]
    except OSError:
        return []


def _requirements_of(python: Path, environment: Environment) -> list[str]:
    """What the loose packages themselves ask for, less what is to be left out."""
    if environment.loose_alone:
        return []
    code = "import sys; from importlib.metadata import requires; print(*requires(sys.argv[1]), sep='\\n')"
    found = []
    for requirement in environment.loose.split():
        for text in asked(python, code, requirement.split("==")[0]):
            name = re.split(r"[^a-z0-9._-]", text.lower())[0]
            if "extra ==" not in text and name not in environment.without:
                found.append(text)
    return found
