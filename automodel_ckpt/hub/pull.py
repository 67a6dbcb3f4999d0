"""Download a model of the Hub into a directory, which appears when it is complete and verified."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from automodel_ckpt.base.durable_io import fsync_directories, fsync_directory, owned
from automodel_ckpt.checkpoint.export.export_manifest import find_export_manifest
from automodel_ckpt.checkpoint.export.files import ANOTHER_OUTPUT, Log
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.remote.pull import check_space
from automodel_ckpt.errors import CheckpointUnusable, Problem, RecipeError
from automodel_ckpt.hub.repository import (
    TRY_AGAIN,
    HubAddress,
    client,
    reporting,
)

_LIBRARY_CACHE = ".cache"


@dataclass(frozen=True)
class Pulled:
    """A finished download. *has_manifest*: the files are an export of this program, and match its manifest."""

    path: Path
    commit: str
    nbytes: int
    has_manifest: bool


def pull(address: HubAddress, directory: Path, log: Log, *, num_threads: int = 8) -> Pulled:
    """Download all files of a revision into *directory*, which must not exist or be empty.

    They are compared with the digests of the Hub and, if there is one, with the manifest of the export. An interrupted
    download is continued by the same call. Raises :class:`HubError` if the Hub fails, :class:`SaveFailed` if a file
    cannot be written, :class:`CheckpointUnusable` for damaged files, and :class:`RecipeError` if *directory* has files.
    """
    from huggingface_hub import RepoFile, snapshot_download

    check_destination(directory)
    api = client()
    with reporting(address, "the download"):
        commit = str(api.repo_info(address.repo, revision=address.branch).sha)
        tree = api.list_repo_tree(address.repo, recursive=True, revision=commit)
        files = [entry for entry in tree if isinstance(entry, RepoFile)]
    nbytes = sum(file.size for file in files)
    staging = directory.with_name(f".{directory.name}.pull-{commit[:12]}")
    staging.mkdir(parents=True, exist_ok=True)
    with owned(staging):
        # An interrupted download has brought a part of it, which this one continues.
        present = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
        check_space(directory.parent, nbytes - present, "the download")
        with reporting(address, "the download"):
            snapshot_download(
                address.repo, revision=commit, local_dir=staging, max_workers=num_threads
            )
        _check(staging, files, log)
        has_manifest = _check_export(staging, address)
        shutil.rmtree(staging / _LIBRARY_CACHE, ignore_errors=True)
        fsync_directories(staging)
        check_destination(directory)
        if directory.exists():
            directory.rmdir()
        staging.rename(directory)
    fsync_directory(directory.parent)
    return Pulled(directory, commit, nbytes, has_manifest)


def check_destination(directory: Path) -> None:
    """Raise :class:`RecipeError` if *directory* exists and is not an empty directory."""
    is_empty = directory.is_dir() and not any(directory.iterdir())
    if os.path.lexists(directory) and not is_empty:
        raise RecipeError(
            "the directory exists and is not empty",
            directory,
            "",
            ANOTHER_OUTPUT,
        )


def _check_export(staging: Path, address: HubAddress) -> bool:
    """Return whether the repository has the manifest of an export.

    Raises :class:`CheckpointUnusable` if its files are not those that the manifest lists.
    """
    try:
        manifest = find_export_manifest(staging)
        problems = manifest.problems() if manifest is not None else []
    except CheckpointUnusable as error:
        manifest, problems = None, [*error.problems]
    hint = (
        "upload the export again (ckpt push); if the files were changed on purpose, delete "
        f"{layout.EXPORT_MANIFEST} from the repository: the files are then not verified"
    )
    for number, problem in enumerate(problems):
        where = f"{os.path.relpath(problem.where, staging)} in {address}"
        problems[number] = replace(problem, where=where, hint=hint)
    CheckpointUnusable.check(problems)
    return manifest is not None


def _check(staging: Path, files: Sequence[Any], log: Log) -> None:
    """Compare the files with the Hub's list. A damaged one is removed, so that another call downloads it again."""
    problems = []
    for file in files:
        name = file.path
        if reason := layout.unsafe_path(name):
            raise CheckpointUnusable("the repository has a file outside of it", name, reason, "")
        path = staging / name
        if not path.is_file() or path.is_symlink() or _differs(path, file):
            path.unlink(missing_ok=True)
            what = "a downloaded file does not have the digest of the Hub"
            problems.append(Problem(what, name, "", TRY_AGAIN))
    CheckpointUnusable.check(problems)
    log(f"files verified by the digests of the Hub: {len(files)}")


def _differs(path: Path, remote: Any) -> bool:
    """Whether a downloaded file differs from its entry in the repository."""
    if path.stat().st_size != remote.size:
        return True
    if remote.lfs is not None:
        digest, expected = hashlib.sha256(), remote.lfs.sha256
    else:
        # SHA-1 is git's name of a content here, not a protection.
        digest = hashlib.sha1(b"blob %d\0" % remote.size, usedforsecurity=False)
        expected = remote.blob_id
    with path.open("rb") as content:
        return bool(hashlib.file_digest(content, lambda: digest).hexdigest() != expected)
