"""The files of another program that an import copies: the config, the tokenizer and the recipe. Imports no torch."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path

from automodel_ckpt.checkpoint.export.export_manifest import find_export_manifest
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import model_file, parse_json, read_safely
from automodel_ckpt.checkpoint.files.type_aliases import FileDict, Files, Strings, ValueDict
from automodel_ckpt.checkpoint.sources.model_files import (
    QUANTIZATION_FILES,
    base_files,
    unreadable,
)
from automodel_ckpt.convert.formats.files import BIN_INDEX
from automodel_ckpt.errors import CheckpointUnusable, unusable

_CONFIG = "config.json"
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

source_error = partial(
    unusable,
    hint="use a directory of *.safetensors or of PyTorch DCP (.metadata and *.distcp), or a checkpoint with model/",
)
"""The error for a source that cannot be imported: what, where and the value."""


def side_files_of(source: Path, directory: Path) -> FileDict:
    """Return config, tokenizer and the like: from ``.hf_metadata``, next to the weights, or in the directory above."""
    for place in (directory / layout.HF_METADATA, directory, source):
        if place.is_symlink() or not (place / _CONFIG).is_file():
            continue
        files = base_files(place)
        if len(files[_CONFIG]) > _MAX_CONFIG_BYTES:
            raise source_error("config.json is too large", place / _CONFIG, len(files[_CONFIG]))
        check_links(place, (layout.EXPORT_MANIFEST,))
        export = find_export_manifest(place, follow_links=True)
        if export is not None:
            for name, content in files.items():
                export.check_bytes(name, content)
        return files
    return {}


def without_unused_code(files: Files) -> FileDict:
    """Return side files without Python files if no JSON file refers to code of the model (``auto_map``).

    A single file of weights is often in the directory of the scripts that wrote it.
    """
    for name, content in files.items():
        if name.endswith(".json") and b'"auto_map"' in content:
            return dict(files)
    return {name: content for name, content in files.items() if not name.endswith(".py")}


def quantization_of(files: Files) -> ValueDict:
    """Find the settings by which weights are quantized.

    Args:
        files: The side files of the weights, by name.

    Returns:
        The settings with their ``quant_method``. Empty for weights that are not quantized.
    """
    with suppress(AttributeError, KeyError, TypeError, ValueError):
        section = parse_json(files[_CONFIG])["quantization_config"]
        return {**section, "quant_method": str(section.get("quant_method", "unknown"))[:100]}
    for name, method in QUANTIZATION_FILES.items():
        if name in files:
            return {"quant_method": method}
    return {}


def recipe_of(source: Path) -> FileDict:
    """Return the recipe that the other program saved, unchanged, for reference, by its name. Empty without one."""
    path = source / layout.CONFIG
    if not path.is_file() or path.is_symlink() or path.stat().st_size > _MAX_RECIPE_BYTES:
        return {}
    return {layout.CONFIG: read_safely(source, layout.CONFIG, limit=_MAX_RECIPE_BYTES)}


def check_links(directory: Path, endings: Strings) -> None:
    """Check symbolic links to the files with these *endings*. Raises :class:`CheckpointUnusable` for a link that
    :func:`~automodel_ckpt.checkpoint.files.safe_open.model_file` does not follow.
    """
    for path in directory.iterdir():
        if path.name.endswith(endings):
            try:
                model_file(directory, path.name)
            except OSError as error:
                raise CheckpointUnusable.all_of([unreadable(error)]) from error


def check_links_of_weights(directory: Path) -> None:
    """Check symbolic links to the files of weights in *directory* by :func:`check_links`."""
    check_links(directory, _WEIGHT_FILES)
