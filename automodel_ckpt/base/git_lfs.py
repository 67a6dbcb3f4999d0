"""Pointers of Git LFS: what a clone of a repository has in the place of its large files if Git LFS is not installed.

Imports nothing.
"""

from __future__ import annotations

POINTER = b"version https://git-lfs.github.com/"
"""The first bytes of a pointer."""
LFS_HINT = "it is a pointer of Git LFS: `git lfs pull` downloads the file itself"
