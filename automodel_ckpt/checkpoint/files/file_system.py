"""Find the type of the file system of a directory. Imports no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPED = re.compile(r"\\([0-7]{3})")
OVERLAY_WARNING = (
    "{} is on an overlay file system: in a container what is saved there is gone with the container. Mount a directory "
    "of the host in its place (docker run -v /data/checkpoints:{} ...)"
)


def overlay_warning(directory: Path) -> str | None:
    """The warning for a *directory* (which may not exist yet) on an overlay file system; else None."""
    real = Path(os.path.realpath(directory))
    return OVERLAY_WARNING.format(directory, real) if file_system_of(real) == "overlay" else None


def file_system_of(path: Path) -> str | None:
    """The type of the file system of a resolved path, which may not exist yet; None where it is unknown.

    Source: proc(5), mountinfo: the fifth field is the mount point; the type follows the separate dash.
    """
    try:
        lines = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return None
    found: tuple[int, str | None] = (0, None)
    for line in lines:
        before, _, after = line.partition(" - ")
        # proc(5): spaces, tabs, newlines and backslashes are written as octal numbers.
        point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), before.split()[4])
        # The last mount on a path hides the others on the same path.
        if after and path.is_relative_to(point) and len(point) >= found[0]:
            found = len(point), after.split()[0]
    return found[1]
