"""Download a model of the Hub into a directory, which appears when it is complete and verified."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from automodel_ckpt.base.durable_io import fsync_directories, fsync_directory
from automodel_ckpt.base.hub_access import chain_of
from automodel_ckpt.checkpoint.export.export_manifest import find_export_manifest
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.ownership import owned
from automodel_ckpt.errors import (
    NOT_ALLOWED,
    AutomodelError,
    CheckpointUnusable,
    Problem,
    RecipeError,
    SaveFailed,
    os_problem,
    writing_hint,
)
from automodel_ckpt.hub.address import HubAddress
from automodel_ckpt.hub.client import client, reporting
from automodel_ckpt.hub.listing import Listed, differs, listed

Log = Callable[[str], None]
_LIBRARY_CACHE = ".cache"
# Not all codes: a connection can fail with an OSError, too.
_OF_FILE_SYSTEMS = {
    *NOT_ALLOWED,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.ENOTDIR,
}


@dataclass(frozen=True, slots=True)
class Pulled:
    """A finished download. *has_manifest*: the files are an export of this program, and match its manifest."""

    directory: Path
    commit: str
    nbytes: int
    has_manifest: bool


def pull(address: HubAddress, directory: Path, log: Log, *, num_threads: int = 8) -> Pulled:
    """Download all files of a revision into *directory*, which must not exist or be empty.

    They are compared with the digests of the Hub and, if there is one, with the manifest of the export. An interrupted
    download is continued by the same call. Raises :class:`HubError` if the Hub fails, :class:`SaveFailed` if a file
    cannot be written, :class:`CheckpointUnusable` for damaged files, and :class:`RecipeError` if *directory* has files.
    """
    check_destination(directory)
    api = client()
    with reporting(address, "the download"):
        commit = str(api.repo_info(address.repo, revision=address.branch).sha)
        files = listed(api, address.repo, commit)
    staging = directory.with_name(f".{directory.name}.pull-{commit[:12]}")
    with _reporting_writes(staging, directory):
        staging.mkdir(parents=True, exist_ok=True)
        with owned(staging):
            with reporting(address, "the download"), _reporting_writes(staging, directory):
                _download(address.repo, commit, staging, num_threads)
            _check(staging, files, log)
            has_manifest = _check_export(staging, address)
            shutil.rmtree(staging / _LIBRARY_CACHE, ignore_errors=True)
            fsync_directories(staging)
            check_destination(directory)
            if directory.exists():
                directory.rmdir()
            staging.rename(directory)
        fsync_directory(directory.parent)
    nbytes = sum(each.size for each in files.values())
    return Pulled(directory, commit, nbytes, has_manifest)


def check_destination(directory: Path) -> None:
    """Raise :class:`RecipeError` if *directory* exists and is not an empty directory."""
    is_empty = directory.is_dir() and not any(directory.iterdir())
    if os.path.lexists(directory) and not is_empty:
        raise RecipeError(
            "the directory exists and is not empty",
            where=str(directory),
            value="",
            hint="choose another one, or remove it",
        )


def _download(repo: str, commit: str, staging: Path, num_threads: int) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download(repo, revision=commit, local_dir=staging, max_workers=num_threads)


@contextlib.contextmanager
def _reporting_writes(staging: Path, directory: Path) -> Iterator[None]:
    """Raise :class:`SaveFailed` with the path in *directory* if a file in *staging* cannot be written."""
    try:
        yield
    except AutomodelError:
        raise
    except Exception as error:
        cause = next(filter(_is_of_file_system, chain_of(error)), None)
        if not isinstance(cause, OSError):
            raise
        # The name of the staging directory, which is hidden, says nothing to the user.
        path = str(cause.filename or directory).replace(str(staging), str(directory), 1)
        failed = OSError(cause.errno, cause.strerror, path)
        hint = f"{writing_hint(cause)}, then run the same command, which continues the download"
        problem = os_problem(failed, "the download could not be written", hint=hint)
        raise SaveFailed.all_of([problem]) from error


def _is_of_file_system(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _OF_FILE_SYSTEMS


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
    in_repository = []
    for problem in problems:
        name = os.path.relpath(problem.where, staging)
        in_repository.append(replace(problem, where=f"{name} in {address}", hint=hint))
    if in_repository:
        raise CheckpointUnusable.all_of(in_repository)
    return manifest is not None


def _check(staging: Path, files: Mapping[str, Listed], log: Log) -> None:
    """Compare the files with the Hub's list. A damaged one is removed, so that another call downloads it again."""
    problems = []
    for name, remote in files.items():
        if reason := layout.unsafe_path(name):
            raise CheckpointUnusable(
                "the repository has a file outside of it", where=name, value=reason, hint=""
            )
        path = staging / name
        if not path.is_file() or path.is_symlink() or differs(path, remote):
            path.unlink(missing_ok=True)
            what = "a downloaded file does not have the digest of the Hub"
            problems.append(Problem(what, name, "", "run the same command again"))
    if problems:
        raise CheckpointUnusable.all_of(problems)
    log(f"files verified by the digests of the Hub: {len(files)}")
