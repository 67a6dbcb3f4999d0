"""The files of another program that an import copies: the config, the tokenizer and the recipe. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.export_manifest import find_export_manifest
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.sources.model_files import is_side_file
from automodel_ckpt.convert.sources.torch_files import BIN_INDEX
from automodel_ckpt.errors import CheckpointUnusable

_CONFIG = "config.json"
# Tokenizers of large vocabularies take some ten megabytes.
_MAX_SIDE_BYTES = 128 << 20
# It is parsed, and then takes up to 25 times its size.
_MAX_CONFIG_BYTES = 16 << 20
_MAX_RECIPE_BYTES = 1 << 20
_WEIGHT_FILES = (
    ".safetensors",
    ".distcp",
    ".bin",
    layout.HF_INDEX,
    BIN_INDEX,
    layout.DCP_METADATA,
    layout.EXPORT_MANIFEST,
)
_HINT = "use a directory of *.safetensors or of PyTorch DCP (.metadata and *.distcp), or a checkpoint with model/"


def side_files_of(source: Path, directory: Path) -> dict[str, bytes]:
    """Return config, tokenizer and the like: from ``.hf_metadata``, beside the weights, or in the directory above."""
    for place in (directory / layout.HF_METADATA, directory, source):
        if place.is_symlink() or not place.is_dir():
            continue
        names = [path.name for path in place.iterdir() if path.is_file()]
        names = sorted(filter(is_side_file, names))
        if _CONFIG not in names:
            continue
        check_links(place, lambda name: is_side_file(name) or name == layout.EXPORT_MANIFEST)
        files: dict[str, bytes] = {}
        for name in names:
            limit = _MAX_CONFIG_BYTES if name == _CONFIG else _MAX_SIDE_BYTES
            files[name] = _content(place / name, limit)
        export = find_export_manifest(place, follow_links=True)
        if export is not None:
            for name, content in files.items():
                export.check_bytes(name, content)
        return files
    return {}


def without_unused_code(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return side files without Python files if no JSON file refers to code of the model (``auto_map``).

    A single file of weights is often in the directory of the scripts that wrote it.
    """
    for name, content in files.items():
        if name.endswith(".json") and b'"auto_map"' in content:
            return dict(files)
    return {name: content for name, content in files.items() if not name.endswith(".py")}


def recipe_of(source: Path) -> dict[str, bytes]:
    """Return the recipe that the other program saved, unchanged, for reference, by its name; empty without one."""
    path = source / layout.CONFIG
    if not path.is_file() or path.is_symlink() or path.stat().st_size > _MAX_RECIPE_BYTES:
        return {}
    return {layout.CONFIG: _content(path, _MAX_RECIPE_BYTES)}


def _content(path: Path, limit: int) -> bytes:
    # read_safely() rejects links. Those of the Hub's cache have passed check_links().
    real = Path(os.path.realpath(path))
    return read_safely(real.parent, real.name, limit=limit)


def check_links(directory: Path, concerned: Callable[[str], bool]) -> None:
    """Check symbolic links to the files selected by *concerned*: they may point within the directory.

    In the Hub's cache, they may also point to the blobs of the same model. Raises :class:`CheckpointUnusable`.
    """
    allowed = [directory]
    if directory.parent.name == "snapshots":
        allowed.append(directory.parent.parent / "blobs")
    for path in directory.iterdir():
        if not path.is_symlink() or not concerned(path.name):
            continue
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(root) for root in allowed):
            what = "a symbolic link points outside of the directory"
            raise CheckpointUnusable(
                what,
                where=str(path),
                value=os.readlink(path),
                hint="name the directory that the link points into, or copy the file",
            )


def check_links_of_weights(directory: Path) -> None:
    """Check symbolic links to the files of weights in *directory* by :func:`check_links`."""
    check_links(directory, lambda file: file.endswith(_WEIGHT_FILES))


def has_links_outside(directory: Path) -> bool:
    """Return whether :func:`check_links_of_weights` rejects a link in *directory*."""
    try:
        check_links_of_weights(directory)
    except CheckpointUnusable:
        return True
    return False


def unusable(what: str, where: Path, value: object) -> CheckpointUnusable:
    """Return the error for a source that cannot be imported."""
    return CheckpointUnusable(what, where=str(where), value=value, hint=_HINT)
