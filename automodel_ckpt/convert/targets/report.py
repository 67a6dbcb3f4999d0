"""What an export reports to the command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ExportReport:
    """An export that was published at *output*: *nbytes* bytes, in *seconds*.

    *checked* states whether the digests of the source were known, and so compared. *warnings* were logged. A target
    that has more to report extends this class.
    """

    output: Path
    num_tensors: int
    nbytes: int
    seconds: float
    checked: bool
    warnings: tuple[str, ...]
