"""Which values a recipe may give to the arguments of a callable on the allowlist, without trust."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

from automodel_ckpt.config.callables.allowlist import NESTED, suggestion
from automodel_ckpt.config.callables.allowlist_entries import Entry

# Builders of `datasets` that read plain tables. Others unpickle (pandas), run SQL or load classes by name (iceberg).
SAFE_READERS = frozenset({"arrow", "csv", "imagefolder", "json", "parquet", "text"})
_SCHEMES = frozenset({"gs", "hf", "http", "https", "s3"})
_LOCATIONS = frozenset(
    {"path", "data_dir", "data_files", "dataset_path", "pretrained_model_name_or_path"}
)


def argument_problem(entry: Entry, name: str, value: Any) -> str | None:
    """Return why *value* is not allowed for the argument *name* without trust; None if it is allowed."""
    if entry.arguments is not None:
        if name not in entry.arguments and not _is_numbers(value):
            return f"only these arguments are allowed: {', '.join(sorted(entry.arguments))}"
        if name in NESTED and isinstance(value, dict):
            return f"write it as a section with _target_: {suggestion(NESTED[name], '')}"
    if name in _LOCATIONS:
        return wrong_location(name, value)
    return None


def wrong_location(name: str, value: Any) -> str | None:
    """Return why a text, or a text in a list or mapping, is not a path, Hub name or URL; None if all of them are.

    fsspec reads chains of file systems (``reference::...``), some of which execute templates or start programs, and
    the name of a builder of `datasets` takes precedence over a directory.
    """
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            reason = wrong_location(name, item)
            if reason is not None:
                return reason
        return None
    if not isinstance(value, str | os.PathLike):
        return None
    text = os.fspath(value)
    scheme, is_url, _ = text.partition("://")
    if "::" in text or (is_url and scheme not in _SCHEMES):
        schemes = ", ".join(sorted(_SCHEMES))
        return f"only local paths, Hub names, and URLs with the scheme {schemes} are allowed"
    may_be_reader = name == "path" and text.isidentifier() and text not in SAFE_READERS
    if may_be_reader and text in _readers():
        return f"only these builders of `datasets` are allowed: {', '.join(sorted(SAFE_READERS))}"
    return None


@functools.cache
def _readers() -> frozenset[str]:
    """Names that ``datasets.load_dataset`` parses as one of its readers, not as a path."""
    modules = importlib.import_module("datasets.packaged_modules")
    # Private, in datasets 2.0 to 4.x; without it, the names below remain, which are the dangerous ones.
    known = getattr(modules, "_PACKAGED_DATASETS_MODULES", {})
    return frozenset(known) | {"pandas", "sql", "webdataset", "generator", "spark", "cache"}


def _is_numbers(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_numbers(item) for item in value)
    # bool is a subclass of int, but a boolean may switch something on, such as force_download.
    return isinstance(value, int | float) and not isinstance(value, bool)
