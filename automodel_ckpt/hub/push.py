"""Upload a model to a repository of the Hub: one commit, so that a branch has all of its files or none.

``upload_folder`` of huggingface_hub makes several commits since its version 2. ``create_commit`` makes one: it first
uploads the contents of large files, and the commit then names them by their SHA-256. Contents that an interrupted
upload transferred are not transferred again.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import parse_json
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.hub.repository import (
    LOGIN_HINT,
    MAIN,
    Content,
    HubAddress,
    HubError,
    client,
    has_token,
    reporting,
)

NUM_THREADS = 5
"""Large files that are uploaded at the same time by default."""


@dataclass(frozen=True)
class Pushed:
    """A finished upload: the commit that has the files, and the bytes of files that the repository did not have. With
    *was_there*, the branch had them already, and no commit was made."""

    commit: str
    nbytes: int
    was_there: bool


def push(
    files: Mapping[str, Content],
    address: HubAddress,
    *,
    message: str,
    private: bool = True,
    num_threads: int = NUM_THREADS,
) -> Pushed:
    """Upload *files* (local files or contents, by path in the repository) to a branch.

    A repository or branch that does not exist is created, the repository *private*. Files of the model that the branch
    had before are removed by the same commit. Others are kept.

    Raises:
        HubError: if the Hub fails or rejects the upload.
        RecipeError: if the repository is public and *private* is set.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    if not has_token():
        raise HubError(
            "there is no token of the Hugging Face Hub",
            address,
            "",
            LOGIN_HINT,
        )
    api = client()
    with reporting(address, "creating the repository"):
        api.create_repo(address.repo, private=private, exist_ok=True)
        info = api.repo_info(address.repo)
    if private and info.private is False:
        raise RecipeError(
            "the repository is public, and the upload was to be private",
            address,
            "",
            "to publish the model: --public (in a recipe, hub.private: false)",
        )
    with reporting(address, "the upload"):
        before = _names_in(api, address)
        head = str(api.repo_info(address.repo, revision=address.branch).sha)
        operations = [
            *(CommitOperationAdd(*each) for each in files.items()),
            *map(CommitOperationDelete, _obsolete(address.repo, head, before, files)),
        ]
        # The library leaves out what the branch has already, and makes no commit if that is all.
        done = api.create_commit(
            address.repo,
            operations,
            commit_message=message,
            revision=address.branch,
            num_threads=num_threads,
            # Another commit meanwhile is an error: it may have removed or replaced some of the files.
            parent_commit=head,
        )
    commit = str(done.oid)
    nbytes = sum(content_bytes(files[name]) for name in files.keys() - before)
    return Pushed(commit, nbytes, was_there=commit == head)


def content_bytes(content: Content) -> int:
    """Return the size of a file's content."""
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _names_in(api: Any, address: HubAddress) -> set[str]:
    """List the files of a branch, which is created if necessary. Raises the library's exceptions."""
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        return set(api.list_repo_files(address.repo, revision=address.branch))
    except RevisionNotFoundError:
        if address.branch == MAIN:
            raise
    # From the main branch, a new branch would show another model until the commit.
    first = api.list_repo_commits(address.repo)[-1].commit_id
    api.create_branch(address.repo, branch=address.branch, revision=first, exist_ok=True)
    return set(api.list_repo_files(address.repo, revision=address.branch))


def _obsolete(repo: str, head: str, before: Set[str], files: Mapping[str, Content]) -> list[str]:
    """List the files of the model that the branch has now, and that are not uploaded again."""
    if layout.EXPORT_MANIFEST not in before:
        return []
    from huggingface_hub import HfFileSystem

    # No file is written, which a kill could leave.
    data = HfFileSystem().cat_file(f"{repo}/{layout.EXPORT_MANIFEST}", revision=head)
    try:
        names = list(parse_json(data)["files"])
    except (ValueError, KeyError, TypeError):
        # Somebody else's: then nothing is removed.
        return []
    return sorted((before & set(names)) - files.keys())
