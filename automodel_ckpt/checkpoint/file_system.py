"""What kind of file system a directory is on, and sizes in words. Imports no torch."""

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


def size_text(nbytes: float) -> str:
    """Bytes in decimal units: ``1.2 MB``."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < (1000 if unit == "B" else 999.95) or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def values_text(number: int) -> str:
    """How many values beside tensors: ``1 value that is not a tensor``."""
    return "1 value that is not a tensor" if number == 1 else f"{number} values that are not tensors"


def others_text(number: int) -> str:
    """How many tensors of others than the model: ``1 tensor that is not the model's``."""
    return "1 tensor that is not the model's" if number == 1 else f"{number} tensors that are not the model's"


def left_out(text: str, number: int) -> str:
    """``1 value … is left out``."""
    return f"{text} {'is' if number == 1 else 'are'} left out"


def overlay_warning(directory: Path) -> str | None:
    """What to tell a user whose *directory* (it need not be there yet) is on an overlay file system; else None."""
    real = Path(os.path.realpath(directory))
    return OVERLAY_WARNING.format(directory, real) if file_system_of(real) == "overlay" else None


def file_system_of(path: Path) -> str | None:
    """The type of the file system that a resolved path is, or will be, on; None where the system does not say.

    Source: proc(5), mountinfo: the fifth field is the mount point, what follows the lone dash begins with the type.
    """
    try:
        lines = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return None
    found: tuple[int, str | None] = (0, None)
    for line in lines:
        before, _, after = line.partition(" - ")
        point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), before.split()[4])
        if after and path.is_relative_to(point) and len(point) >= found[0]:
            found = len(point), after.split()[0]
    return found[1]
