"""URLs of object stores: which ones are accepted, what they need, and how they are shown without credentials.

If a run's directory is a URL, the run writes to a local directory (:func:`scratch_directory`) in the user's cache
(:func:`cache_directory`). Its checkpoints are uploaded from there.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from automodel_ckpt.errors import RecipeError

T = TypeVar("T")

_LIBRARIES = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
    "az": ("adlfs", "azure"),
    "abfs": ("adlfs", "azure"),
    "abfss": ("adlfs", "azure"),
    "file": ("fsspec", ""),
    "memory": ("fsspec", ""),
}
"""Scheme of a URL -> the library that reads and writes it, and the extra of this package that installs the library."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://", re.ASCII)
_USER = re.compile(r"(\w://)[^\s/'\"@]+@")
_QUERY = re.compile(r"(\w://[^\s?'\"]*)\?[^\s'\"]*")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._=-]+", re.ASCII)
_KEEP = ("keep_last", "keep_best", "keep_every_steps", "keep_steps")
_SECRET = re.compile(r"key|secret|token|password|credential|connection_string|sas", re.IGNORECASE)
_ENVIRONMENT = "give credentials in the environment or the files that the store's own tools read"
OPTIONS = frozenset(
    {"endpoint_url", "region_name", "profile", "anon", "requester_pays", "project", "account_name"}
)
"""Options of a store that a recipe may set. None of them is a secret, and none names code or a file."""


def is_url(text: str) -> bool:
    """Whether *text* is the URL of a store, and not a path of the local file system."""
    return _URL.match(text) is not None


def is_store_url(text: str) -> bool:
    """Whether *text* is a URL with the scheme of a store that can be opened, in lower or upper case."""
    match = _URL.match(text)
    return match is not None and match[1].lower() in _LIBRARIES


def extra_of(url: str) -> str:
    """Return the extra of this package that installs the library for *url*. Empty if there is none."""
    return _LIBRARIES.get(url.partition("://")[0], ("", ""))[1]


def public(url: str) -> str:
    """Return *url* without user name, password, query and fragment, for logs and errors."""
    try:
        parts = urlsplit(url)
    except ValueError:
        # Such as an unclosed bracket: what follows may be anything, also a secret.
        return f"{url.partition('://')[0]}://(malformed)"
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def has_credentials(url: str) -> bool:
    """Whether *url* has a user name, a password or a query, or is malformed and may have them."""
    return public(url).rstrip("/") != url.rstrip("/")


def scrubbed(text: str) -> str:
    """Return *text* without user names, passwords and queries of URLs. A query may be a signature."""
    return _QUERY.sub(r"\1", _USER.sub(r"\1", text))


def scrub(error: BaseException) -> None:
    """Remove what :func:`scrubbed` removes from the messages of *error* and its causes, which tracebacks show."""
    each: BaseException | None = error
    while each is not None:
        each.args = tuple(scrubbed(arg) if isinstance(arg, str) else arg for arg in each.args)
        if isinstance(each, OSError) and isinstance(each.strerror, str):
            each.strerror = scrubbed(each.strerror)
        each = each.__cause__ or each.__context__


def check_url(url: str, where: str) -> str:
    """Return *url* without a slash at its end. *where* is the key or argument that has it.

    Raises :class:`RecipeError` for an unknown scheme, for credentials in the URL, and for a URL without a bucket.
    """
    match = _URL.match(url)
    scheme = match[1] if match else ""
    if scheme == "hf":
        raise RecipeError(
            "the Hugging Face Hub is not a store of checkpoints",
            where,
            public(url),
            "for models, use the section hub (or `ckpt push RUN hub:ORG/NAME`); for checkpoints, another store, or a "
            "bucket that is mounted as a directory (file://)",
        )
    if scheme not in _LIBRARIES:
        shown = public(url) if "://" in url else url
        raise RecipeError(
            "this is not the URL of a store",
            where,
            shown,
            f"use BUCKET/PATH after one of {', '.join(f'{name}://' for name in _LIBRARIES)}",
        )
    if any(character < " " for character in url):
        # urlsplit() removes tabs and line breaks.
        raise RecipeError(
            "the URL of a store contains a control character", where, repr(public(url))
        )
    if has_credentials(url):
        raise RecipeError(
            "the URL of a store must not contain credentials or options",
            where,
            public(url),
            _ENVIRONMENT,
        )
    is_local = scheme in ("file", "memory")
    _, _, place = url.partition("://")
    has_place = place.strip("/") if is_local else urlsplit(url).netloc
    if not has_place or ".." in place.split("/"):
        hint = "use file:///PATH" if scheme == "file" else f"use {scheme}://BUCKET/PATH"
        raise RecipeError("the URL of a store names no directory in it", where, url, hint)
    return url.rstrip("/")


def check_library(url: str, where: str) -> None:
    """Raise :class:`RecipeError` if the library that reads and writes the store of a valid *url* is not installed."""
    scheme = url.partition("://")[0]
    library, extra = _LIBRARIES[scheme]
    if importlib.util.find_spec(library) is None:
        raise RecipeError(
            f"{scheme}:// needs the library {library}, which is not installed",
            where,
            url,
            f"pip install 'automodel_ckpt[{extra}]'",
        )


def check_options(options: Mapping[str, Any], where: str) -> None:
    """Raise :class:`RecipeError` for options of a store that are secrets, which would be in config.yaml, or unknown."""
    for name, value in options.items():
        # The other options, such as the name of a region, are no URLs.
        is_url = isinstance(value, str) and (name == "endpoint_url" or "://" in value)
        if name in OPTIONS and not (is_url and has_credentials(value)):
            continue
        is_secret = name in OPTIONS or _SECRET.search(name) is not None
        hint = _ENVIRONMENT if is_secret else f"options are {', '.join(sorted(OPTIONS))}"
        raise RecipeError(
            "a secret must not be in a recipe" if is_secret else "unknown option of a store",
            f"{where}.{name}",
            "(not shown)",
            hint,
        )


# ---------------------------------------------------------------- local directories


def cache_directory() -> Path:
    """The cache of the user: ``$AUTOMODEL_CKPT_CACHE`` if set, otherwise ``~/.cache/automodel_ckpt``.

    For a user without a writable home, as in containers, it is a directory in the temporary directory.
    Raises PermissionError if that directory belongs to another user.
    """
    named = os.environ.get("AUTOMODEL_CKPT_CACHE")
    if named:
        return Path(named).expanduser()
    home = Path(os.path.expanduser("~/.cache/automodel_ckpt"))
    # expanduser() returns the text unchanged for a user without a home.
    if home.is_absolute():
        with suppress(OSError):
            home.mkdir(parents=True, exist_ok=True)
            if os.access(home, os.W_OK | os.X_OK):
                return home
    directory = Path(tempfile.gettempdir()) / f"automodel_ckpt-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    # Another user may have created the directory, or a link with its name, to control the data that is trained on.
    if directory.lstat().st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(directory))
    return directory


def scratch_directory(url: str, parent: str | None) -> Path:
    """Return the local directory of a run that has its checkpoints in the store at *url*.

    It is in *parent*, by default in the user's cache (:func:`cache_directory`). Its name depends on the URL alone, so
    that a restart finds it, and two runs never share it. Raises PermissionError if there is no directory for the cache.
    """
    runs = cache_directory() / "runs" if parent is None else Path(parent).expanduser()
    url = url.rstrip("/")
    _, _, location = url.partition("://")
    readable = _NOT_IN_NAMES.sub("-", location).strip("-.")[-60:]
    # The readable part may be the same for different URLs.
    digest = hashlib.blake2b(url.encode(), digest_size=4).hexdigest()
    return runs / f"{readable}-{digest}"


def with_remote(options: T, url: str, storage: Callable[..., Any]) -> T:
    """Return the checkpoint options of a run with the store at *url* as its directory and as ``remote``.

    *options* is a dataclass with the keys of the section ``checkpoint``, and *storage* makes the value of ``remote``.
    The rules of what to keep apply to the store, unless ``remote`` has its own. On the local disk, the newest
    checkpoint is kept, and what is not uploaded yet.
    """
    current: Any = options
    settings = {}
    if current.remote is not None:
        # Not vars(): the options of programs have slots.
        for field in dataclasses.fields(current.remote):
            settings[field.name] = getattr(current.remote, field.name)
    settings["url"] = url.rstrip("/")
    if settings.get("keep_last") is None:
        settings |= {key: getattr(current, key) for key in _KEEP}
    staged: T = dataclasses.replace(
        current,
        remote=storage(**settings),
        keep_last=max(1, getattr(current, "average_last", None) or 0),
        keep_best=0,
        keep_every_steps=None,
        keep_steps=[],
    )
    return staged
