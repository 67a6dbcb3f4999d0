"""URLs of object stores: which ones are accepted, what they need, and how they are shown without credentials."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from automodel_ckpt.errors import RecipeError

_LIBRARIES = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
    "az": ("adlfs", "azure"),
    "abfs": ("adlfs", "azure"),
    "abfss": ("adlfs", "azure"),
    "hf": ("huggingface_hub", ""),
    "file": ("fsspec", ""),
    "memory": ("fsspec", ""),
}
"""Scheme of a URL -> the library that reads and writes it, and the extra of this package that installs the library."""
_URL = re.compile(r"([a-z0-9]+)://", re.ASCII)
_SECRET = re.compile(r"key|secret|token|password|credential|connection_string|sas", re.IGNORECASE)
OPTIONS = frozenset(
    {"endpoint_url", "region_name", "profile", "anon", "requester_pays", "project", "account_name"}
)
"""Options of a store that a recipe may set. None of them is a secret, and none names code or a file."""


def is_url(text: str) -> bool:
    """Whether *text* is the URL of a store, and not a path of the local file system."""
    return _URL.match(text) is not None


def public(url: str) -> str:
    """Return *url* without user name, password, query and fragment, for logs and errors."""
    try:
        parts = urlsplit(url)
    except ValueError:
        # Such as an unclosed bracket: what follows may be anything, also a secret.
        return f"{url.partition('://')[0]}://(malformed)"
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def check_url(url: str, where: str) -> str:
    """Return *url* without a slash at its end. *where* is the key or argument that has it.

    Raises :class:`RecipeError` for an unknown scheme, for credentials in the URL, for a URL without a bucket, and if
    the library of the store is not installed.
    """
    match = _URL.match(url)
    scheme = match[1] if match else ""
    if scheme not in _LIBRARIES:
        raise RecipeError(
            "this is not the URL of a store",
            where=where,
            value=public(url) if "://" in url else url,
            hint=f"use BUCKET/PATH after one of {', '.join(f'{name}://' for name in _LIBRARIES)}",
        )
    if public(url).rstrip("/") != url.rstrip("/"):
        raise RecipeError(
            "the URL of a store must not contain credentials or options",
            where=where,
            value=public(url),
            hint="give credentials in the environment or the files that the store's own tools read",
        )
    parts = urlsplit(url)
    if not (parts.netloc or scheme in ("file", "memory")) or ".." in parts.path.split("/"):
        raise RecipeError(
            "the URL of a store names no directory in it",
            where=where,
            value=url,
            hint=f"use {scheme}://BUCKET/PATH",
        )
    library, extra = _LIBRARIES[scheme]
    if importlib.util.find_spec(library) is None:
        raise RecipeError(
            f"{scheme}:// needs the library {library}, which is not installed",
            where=where,
            value=url,
            hint=f"pip install 'automodel_ckpt[{extra}]'",
        )
    return url.rstrip("/")


def check_options(options: Mapping[str, Any], where: str) -> None:
    """Raise :class:`RecipeError` for options of a store that are secrets, which would be in config.yaml, or unknown."""
    for name, value in options.items():
        if name in OPTIONS:
            continue
        is_secret = _SECRET.search(name) is not None
        hint = f"options are {', '.join(sorted(OPTIONS))}"
        if is_secret:
            hint = (
                "give credentials in the environment or the files that the store's own tools read"
            )
        raise RecipeError(
            "a secret must not be in a recipe" if is_secret else "unknown option of a store",
            where=f"{where}.{name}",
            value="(not shown)" if is_secret else value,
            hint=hint,
        )
