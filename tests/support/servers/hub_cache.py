"""A repository of the Hugging Face Hub in a cache on disk, as downloads of its revisions leave it."""

import shutil
from collections.abc import Mapping
from pathlib import Path


def write_repository(cache: Path, name: str, revisions: Mapping[str, Path]) -> dict[str, Path]:
    """Write the repository *name* (``owner/name``) with copies of directories as its branches.

    Returns the directory of each branch in the *cache*.
    """
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    snapshots = {}
    for number, (branch, directory) in enumerate(revisions.items(), start=1):
        commit = str(number) * 40
        snapshots[branch] = repository / "snapshots" / commit
        shutil.copytree(directory, snapshots[branch])
        (repository / "refs" / branch).write_text(commit)
    return snapshots
