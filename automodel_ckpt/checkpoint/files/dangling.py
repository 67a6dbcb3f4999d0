"""Symbolic links whose target does not exist."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class DanglingLink(NamedTuple):
    """A symbolic link on the way to a file, and the path that it leads to, which does not exist."""

    link: Path
    target: Path

    def __str__(self) -> str:
        return f"{self.link} is a link to {self.target}, which does not exist"


def dangling_link(path: Path) -> DanglingLink | None:
    """The first dangling link among *path* and its parents; None if there is none."""
    for each in reversed([path, *path.parents]):
        # Unlike Path.exists(), this is False and not an error in a directory that cannot be searched.
        if os.path.exists(each):
            continue
        if not os.path.islink(each):
            return None
        return DanglingLink(each, Path(os.path.realpath(each)))
    return None
