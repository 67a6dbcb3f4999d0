"""The software and host that write a checkpoint, for its manifest. Imports none of the libraries."""

from __future__ import annotations

import functools
import platform
import socket
import subprocess
import sys
from importlib import metadata

from automodel_ckpt.base.version import __version__
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict

_PACKAGES = ("torch", "transformers", "safetensors", "peft", "datasets", "numpy")


@functools.cache
def environment() -> ValueDict:
    """Interpreter, library versions, host, and the git commit of the working directory (None outside a repository)."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        # An editable install has the metadata of the revision that it was installed from.
        "packages": {
            "automodel-ckpt": __version__,
            **{name: version_of(name) for name in _PACKAGES},
        },
        "git_commit": _git_commit(),
    }


def version_of(package: str) -> str | None:
    """The installed version; None where the package is not installed, or runs from its source."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    # Not `git status`: it runs programs that .git/config of the directory names, such as filters and monitors.
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
