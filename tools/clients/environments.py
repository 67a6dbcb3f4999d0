"""Virtual environments for clients: one directory each, made anew when what it should hold has changed."""

from __future__ import annotations

import hashlib
import os
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
    for requirements, options in (
        (environment.first, _torch_source(environment.first)), (environment.loose, ["--no-deps"]),
        (_requirements_of(python, environment), []), (environment.then, []),
    ):  # fmt: skip
        if requirements:
            command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options]
            subprocess.run(["nice", *command, *requirements], check=True, env=own_variables())
    stamp.write_text(environment.key)
    return python


def own_variables() -> dict[str, str]:
    """This process's environment without what would lead another interpreter to this one's packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


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
    code = (
        "import sys; from importlib.metadata import requires\n"
        "from pip._vendor.packaging.requirements import Requirement\n"
        "for text in (text for name in sys.argv[1:] for text in requires(name) or []):\n"
        "    r = Requirement(text)\n"
        "    if r.marker is None or r.marker.evaluate({'extra': ''}):\n"
        "        print(r.name, text.split(';')[0].strip(), sep='\\t')\n"
    )
    done = subprocess.run([python, "-c", code, *names], check=True, capture_output=True, text=True, env=own_variables())
    pairs = [line.split("\t") for line in done.stdout.splitlines()]
    return [text for name, text in pairs if name.lower() not in environment.without]
