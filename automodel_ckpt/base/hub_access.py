"""Access to repositories of the Hugging Face Hub: which commit a name is, and what to do if it cannot be read.

huggingface_hub repeats requests for half a minute before it reports that there is no network, and transformers makes
several such requests. :func:`resolve_commit` makes one request before them. If that fails, its error states what to do.
After it, the library is called with the commit: it then needs no request for files in the cache, and the files of a
model belong to one commit. A complete commit in the cache is asked for too: transformers lists the repository's
files in any case, which would take minutes without a network. Imports huggingface_hub only when it is called, and never
torch.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from automodel_ckpt.errors import RecipeError

log = logging.getLogger("automodel_ckpt")

Kind = Literal["model", "dataset"]

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", re.ASCII)
_LONGEST_NAME = 96
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_REVISION = re.compile(r"[\w.+-]+(/[\w.+-]+)*", re.ASCII)
MAIN = "main"
_PROBES = {"model": "config.json", "dataset": "README.md"}
"""The file that :func:`resolve_commit` requests. It may be missing: the reply has the commit anyway."""
_TIMEOUT_SECONDS = 10.0
_PAUSES = (1.0, 2.0)
"""Seconds between attempts after a reply that another attempt may improve (500, 503, a reset connection)."""
_LONGEST_WAIT_SECONDS = 5.0
"""A rate limit that ends sooner is waited for."""
_NAMES: Mapping[Kind, str] = {"model": "model", "dataset": "data set"}
_lost: list[str] = []
"""What failed, if this process is offline because of that, and not because the user wants it."""

_withheld: list[bool] = []
"""Whether the user has a token, inside of :func:`without_token`."""


@dataclass(frozen=True)
class HubProblem:
    """Why a repository cannot be read or written, in one line, and what to do. *is_temporary*: another attempt may
    succeed, without a change by the user."""

    what: str
    hint: str
    is_temporary: bool = False
    cause: str = ""
    """What happened, if *what* also states its consequence."""


def is_hub_name(name: str) -> bool:
    """Whether *name* can name a repository, and no local file or directory has it."""
    return _HUB_NAME.fullmatch(name) is not None and not os.path.exists(os.path.expanduser(name))


def is_repo_name(repo: str) -> bool:
    """Whether *repo* is ``ORG/NAME``, as the Hub accepts it for a repository that is written."""
    parts = repo.split("/")
    if len(parts) != 2 or repo.endswith(".git") or ".." in repo or "--" in repo:
        return False
    return all(_NAME.fullmatch(part) and len(part) <= _LONGEST_NAME for part in parts)


def is_commit(revision: str) -> bool:
    """Whether *revision* is a complete commit id, which always names the same files."""
    return _COMMIT.fullmatch(revision) is not None


def is_revision_name(revision: str) -> bool:
    """Whether *revision* can be a branch, tag or commit. The cache has a file of this name for each branch."""
    return _REVISION.fullmatch(revision) is not None and ".." not in revision


@contextlib.contextmanager
def without_token() -> Iterator[None]:
    """Send no token to the Hub inside this context. What it gives only with a token comes from the cache then."""
    from huggingface_hub import constants, get_token

    _withheld.append(get_token() is not None)
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    withheld = {name: os.environ.pop(name) for name in names if name in os.environ}
    path, constants.HF_TOKEN_PATH = constants.HF_TOKEN_PATH, os.devnull
    try:
        yield
    finally:
        _withheld.pop()
        constants.HF_TOKEN_PATH = path
        os.environ.update(withheld)


# ---------------------------------------------------------------- which commit a name is


def resolve_commit(name: str, revision: str | None = None, *, where: str) -> str | None:
    """Return the commit that *revision* of a model's repository is now. None: the main branch.

    One request, without the retries of the library. Without a network, the commit is the one in the cache, and the
    process is offline from then on. None when the repository has no commit that could be determined.

    Raises :class:`RecipeError`, for the key *where*, if the repository cannot be read, and is not in the cache.
    """
    from huggingface_hub import constants

    if revision is not None and not is_revision_name(revision):
        raise RecipeError("this is not a branch, tag or commit", where, revision)
    cached = cached_commit(name, revision)
    if constants.HF_HUB_OFFLINE:
        if cached is None:
            raise _error(_not_cached(name, "model"), name, revision, where)
        return cached
    commit = _commit_or_offline(name, revision, "model", where, cached)
    if not constants.HF_HUB_OFFLINE:
        _note_commit(name, revision or MAIN, commit)
    return commit


def check_access(name: str, revision: str | None = None, *, where: str) -> str | None:
    """Check by one request that a data set can be read, for a library with its own cache; return its commit.

    Without a network, the process is offline from then on. Returns None then, and if the repository has no commit that
    could be determined. Raises :class:`RecipeError`, for the key *where*.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    return _commit_or_offline(name, revision, "dataset", where, None)


def _commit_or_offline(
    name: str, revision: str | None, kind: Kind, where: str, cached: str | None
) -> str | None:
    """Request the commit of a repository. Without a network, go offline if its files can be in a cache.

    Data sets are in the cache of their own library.
    """
    try:
        return _requested_commit(name, revision or MAIN, kind)
    except Exception as error:  # each version of the library has its own exceptions
        problem = explain(error, name, kind)
        if problem is None:
            raise
        if cached is not None and cached == revision and not problem.is_temporary:
            # A deleted repository, for example: its files in the cache belong to this commit.
            return cached
        if not problem.is_temporary or (cached is None and kind == "model"):
            raise _error(problem, name, revision, where) from error
        cause = problem.cause or problem.what
        used = "caches" if cached is None else f"commit {cached[:12]} in the cache"
        log.warning("%s: %s; using %s, and no network from now on", name, cause, used)
        go_offline(cause)
        return cached


def cached_commit(name: str, revision: str | None = None) -> str | None:
    """Return the commit of a model's repository in the library's cache, or None when it is not there."""
    revision = revision or MAIN
    if not is_revision_name(revision):
        return None
    directory = _cache_of(name)
    if _COMMIT.fullmatch(revision) is None:
        try:
            revision = (directory / "refs" / revision).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None
    has_files = _COMMIT.fullmatch(revision) and (directory / "snapshots" / revision).is_dir()
    return revision if has_files else None


def _note_commit(name: str, revision: str, commit: str | None) -> None:
    """Write into the library's cache which commit a branch or tag is, for later starts without a network.

    The library does so where it is called with the name. After :func:`resolve_commit`, it is called with the commit.
    """
    if commit is None or commit == revision:
        return
    path = _cache_of(name) / "refs" / revision
    # Later starts cannot use a cache that cannot be written.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(f".{path.name}.{os.getpid()}")
        staged.write_text(commit)
        staged.replace(path)


def _cache_of(name: str) -> Path:
    """Return the directory of a model's repository in the library's cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"))


def go_offline(cause: str) -> None:
    """Let the libraries of the Hub make no requests in this process and those that it starts, because of *cause*."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    _lost.append(cause)
    os.environ["HF_HUB_OFFLINE"] = "1"
    # The library reads the variable when it is imported, and this value at each request.
    constants.HF_HUB_OFFLINE = True
    datasets = sys.modules.get("datasets")
    if datasets is not None:
        datasets.config.HF_HUB_OFFLINE = True


def _requested_commit(name: str, revision: str, kind: Kind) -> str | None:
    from huggingface_hub import constants, hf_hub_url

    # The endpoint is given, because the library's template of URLs has the one of its import.
    url = hf_hub_url(
        name, _PROBES[kind], repo_type=kind, revision=revision, endpoint=constants.ENDPOINT
    )
    for pause in _PAUSES:
        try:
            return _commit_at(url)
        except Exception as error:
            seconds = _seconds_to_retry(error, pause)
            if seconds is None:
                raise
        time.sleep(seconds)
    return _commit_at(url)


def _commit_at(url: str) -> str | None:
    """Return the commit in the reply to a request for the header of a file. Raises the library's exceptions."""
    from huggingface_hub import errors, get_hf_file_metadata

    try:
        # One request, and redirects on the same host, as for a repository that was renamed.
        return get_hf_file_metadata(url, timeout=_TIMEOUT_SECONDS).commit_hash
    except errors.RemoteEntryNotFoundError as error:
        return error.response.headers.get("X-Repo-Commit")


def _seconds_to_retry(error: Exception, pause: float) -> float | None:
    """Return the seconds until another attempt, usually *pause*, or None when it cannot help."""
    status = _status_of(error)
    if status == 429:
        seconds = _retry_after(error)
        return None if seconds is None or seconds > _LONGEST_WAIT_SECONDS else seconds
    refused = ConnectionRefusedError | socket.gaierror
    is_refused = any(isinstance(each, refused) for each in chain_of(error))
    is_connection = _is_connection_error(error) and not is_refused
    return pause if is_connection or (status or 0) >= 500 else None


# ---------------------------------------------------------------- what to do about an error


def explain(error: BaseException, name: str, kind: Kind = "model") -> HubProblem | None:
    """Return what an exception about a repository means, or None when the Hub has nothing to do with it.

    The library's exceptions can be the cause of the exception, as in exceptions of transformers and datasets.
    """
    from huggingface_hub import constants, errors, get_token

    chain = list(chain_of(error))
    if any(getattr(each, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for each in chain):
        return HubProblem(
            "the disk of the Hub's cache is full",
            f"free space in {constants.HF_HUB_CACHE} (`hf cache ls`), or set HF_HOME to another disk",
        )
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    has_token = get_token() is not None
    missing = (errors.GatedRepoError, errors.RepositoryNotFoundError)
    if any(_withheld) and any(
        isinstance(each, missing) or _status_of(each) == 401 for each in chain
    ):
        return _not_cached(name, kind, "the Hub refuses this, and a dry run sends it no token")
    if any(isinstance(each, errors.GatedRepoError) for each in chain):
        login = "" if has_token else ", then `hf auth login`"
        return HubProblem(
            f"access to this {_NAMES[kind]} is restricted (gated)",
            f"request access at {page}{login}",
        )
    for each in chain:
        if isinstance(each, errors.RevisionNotFoundError):
            return HubProblem("there is no such branch, tag or commit", f"see {page}/tree/main")
        is_hidden = _status_of(each) == 401 and not has_token
        if isinstance(each, errors.RepositoryNotFoundError) or is_hidden:
            private = "if it is private, the token of `hf auth whoami` has no access"
            return HubProblem(
                f"there is no such {_NAMES[kind]}, or it is private",
                f"check the name; {private if has_token else 'for a private one, `hf auth login`'}",
            )
        problem = _of_status(each, has_token)
        if problem is not None:
            return problem
    absent = (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, FileNotFoundError)
    if constants.HF_HUB_OFFLINE and any(isinstance(each, absent) for each in chain):
        return _not_cached(name, kind)
    if any(_is_connection_error(each) for each in chain):
        return _not_cached(name, kind, "the Hub cannot be reached")
    return None


def _of_status(error: BaseException, has_token: bool) -> HubProblem | None:
    status = _status_of(error)
    if status is None or status < 400:
        return None
    message = getattr(error, "server_message", None) or str(error)
    what, hint = f"the Hub rejects the request ({status}): {' '.join(message.split())[:200]}", ""
    if status == 401:
        what = "the Hub rejects the token" if has_token else "the Hub needs a login"
        hint = "`hf auth login` with a valid token, or correct HF_TOKEN"
    elif status == 403:
        what = "the token does not have this right"
        hint = "use a token with access (write access to upload) from https://huggingface.co/settings/tokens"
    elif status == 429:
        seconds = _retry_after(error)
        when = "later" if seconds is None else f"in {seconds:.0f} s"
        what = "the Hub limits the rate of requests (429)"
        hint = f"try again {when}; requests with a token (`hf auth login`) have higher limits"
    elif status >= 500:
        what = f"the Hub has a failure ({status})"
        hint = "try again later; https://status.huggingface.co shows its state"
    return HubProblem(what, hint, is_temporary=status == 429 or status >= 500)


def _not_cached(name: str, kind: Kind, cause: str = "") -> HubProblem:
    """Describe a repository that is not in the cache, and cannot be read because of *cause*; empty: it is offline."""
    option = "" if kind == "model" else "--repo-type dataset "
    command = f"`hf download {option}{shlex.quote(name)}`"
    absent = f"this {_NAMES[kind]} is not in the cache"
    if not cause and not _lost:
        return HubProblem(
            f"{absent}, and HF_HUB_OFFLINE is set",
            f"download it with {command} where there is a network, or give a local path",
        )
    hint = f"check the network, download it with {command} elsewhere (HF_HOME is the cache), or give a local path"
    if any(_withheld) and cause and not _lost:
        hint = f"check the name; download it with {command}, or start without --dry-run"
    cause = _lost[0] if _lost else cause
    return HubProblem(f"{cause}, and {absent}", hint, is_temporary=True, cause=cause)


def _error(problem: HubProblem, name: str, revision: str | None, where: str) -> RecipeError:
    value = name if revision is None else f"{name}@{revision}"
    return RecipeError(problem.what, where, value, problem.hint)


def explained(
    error: BaseException, name: str, where: str, kind: Kind = "model"
) -> RecipeError | None:
    """Return the error to raise for an exception about a repository *name* that the key *where* gives.

    Returns None when the Hub has nothing to do with it, or *name* is a local path.
    """
    if not is_hub_name(name):
        return None
    problem = explain(error, name, kind)
    return None if problem is None else _error(problem, name, None, where)


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, and then those that it follows from, the first cause last."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _status_of(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _retry_after(error: BaseException) -> float | None:
    headers: Any = getattr(getattr(error, "response", None), "headers", {})
    text = str(headers.get("Retry-After", ""))
    return float(text) if text.isascii() and text.isdigit() else None


def _is_connection_error(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
        return True
    # httpx, or its successor in later versions of the library: neither is a dependency of this package.
    bases = {each.__name__ for each in type(error).__mro__ if each.__module__.startswith("httpx")}
    return bool(bases & {"NetworkError", "TimeoutException", "RemoteProtocolError", "ProxyError"})
