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
_NAME = re.compile(r"[a-z0-9._-]+")
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Environment:
    """What to install, in order: each list of requirements by one call of pip; *loose* ones without dependencies.

    *without* names requirements of the loose ones that are left out (GPU libraries, media codecs); all others of
    theirs are installed.
    """

    name: str
    first: Sequence[str] = ()
    loose: Sequence[str] = ()
    then: Sequence[str] = ()
    without: frozenset[str] = frozenset()
    all_of_loose: bool = False

    @property
    def key(self) -> str:
        return hashlib.sha256(repr((sys.version, self)).encode()).hexdigest()


def python_of(environment: Environment, root: Path) -> Path:
    """The interpreter of *environment*, made below *root* where it is not there yet.

    Raises subprocess.CalledProcessError where something cannot be installed.
    """
    directory = root / environment.name
    python, stamp = directory / "bin" / "python", directory / ".ready"
    if stamp.is_file() and stamp.read_text() == environment.key:
        return python
    print(f"  installing {environment.name} in {directory}", flush=True)
    shutil.rmtree(directory, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    _install(python, environment.first, *_torch_source(environment.first))
    _install(python, environment.loose, "--no-deps")
    _install(python, _requirements_of(python, environment))
    _install(python, environment.then)
    stamp.write_text(environment.key)
    return python


def _install(python: Path, requirements: Sequence[str], *options: str) -> None:
    if requirements:
        command = [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            *options,
        ]
        subprocess.run(["nice", *command, *requirements], check=True, env=own_variables())


def own_variables() -> dict[str, str]:
    """This process's environment without what would lead another interpreter to this one's packages."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }


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
    if not environment.all_of_loose:
        return []
    names = [requirement.split("==")[0] for requirement in environment.loose]
    code = "import sys; from importlib.metadata import requires; print(*requires(sys.argv[1]), sep='\\n')"
    found = []
    for name in names:
        done = subprocess.run(
            [python, "-c", code, name],
            check=True,
            capture_output=True,
            text=True,
            env=own_variables(),
        )
        found += [text for text in done.stdout.splitlines() if "extra ==" not in text]
    return [text for text in found if _NAME.match(text.lower())[0] not in environment.without]  # type: ignore[index]
