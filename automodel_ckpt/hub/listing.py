"""The files of a repository as the Hub lists them, and their comparison with local files."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Content = Path | bytes
"""A local file, or what is to be its content."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A file of a repository: the SHA-256 of a large file (LFS, Xet), and git's id of its entry."""

    size: int
    sha256: str | None
    git_id: str


def listed(api: Any, repo: str, revision: str) -> dict[str, Listed]:
    """Return the files of a revision by their paths. *api* is the library's client, whose exceptions it raises."""
    found = {}
    for entry in api.list_repo_tree(repo, recursive=True, revision=revision):
        git_id = getattr(entry, "blob_id", None)
        # Directories have none.
        if git_id is not None:
            sha256 = entry.lfs.sha256 if entry.lfs is not None else None
            found[entry.path] = Listed(entry.size, sha256, git_id)
    return found


def differences(files: Mapping[str, Content], found: Mapping[str, Listed]) -> list[str]:
    """Describe those of *files* that a repository does not have with the same content."""
    problems = []
    for name, content in files.items():
        remote = found.get(name)
        if remote is None:
            problems.append(f"{name} is missing")
        elif differs(content, remote):
            problems.append(f"{name} differs")
    return problems


def differs(content: Content, remote: Listed) -> bool:
    """Whether a local file or content is not that of a file of the repository."""
    if size_of(content) != remote.size:
        return True
    digest, expected = hashlib.sha256(), remote.sha256
    if expected is None:
        # SHA-1 is git's name of a content here, not a protection.
        digest = hashlib.sha1(b"blob %d\0" % remote.size, usedforsecurity=False)
        expected = remote.git_id
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
        return hashlib.file_digest(file, lambda: digest).hexdigest() != expected


def size_of(content: Content) -> int:
    """The size of a local file or content in bytes."""
    return len(content) if isinstance(content, bytes) else content.stat().st_size
