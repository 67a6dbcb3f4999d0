"""The maps of the base model in ``.hf_metadata``: each tensor's file, dtype and shape. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from automodel_ckpt.checkpoint.export.plan import BaseMaps as BaseMaps
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.bounded_json import parse_json, sizes_of, text
from automodel_ckpt.checkpoint.files.dtypes import dtype_code
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.files.type_aliases import Texts, ValueDict
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.errors import unusable

FILE_INDEX_MAP = "fqn_to_file_index_mapping.json"
DTYPE_MAP = "fqn_to_dtype_mapping.json"
EXPECTED_TENSORS = "expected_tensors.json"
MAPS = frozenset({FILE_INDEX_MAP, DTYPE_MAP, EXPECTED_TENSORS})
# A line of a hundred bytes for each of some hundred thousand tensors; parsed it takes up to 25 times as much.
_MAX_MAP_BYTES = 16 << 20


def maps_of(source: Source) -> BaseMaps:
    """Return the maps of the base of *source*. Hugging Face files are their own base.

    Raises :class:`CheckpointUnusable` for a map in another format.
    """
    if source.averaged is not None:
        maps = maps_of(source.averaged)
        stored = {fqn: tensor.dtype for fqn, tensor in source.averaged.tensors.items()}
        return replace(maps, dtype={**stored, **(maps.dtype or {})})
    if not source.finished:
        return read_maps(source.metadata_directory)
    files = {key: tensor.slices[0].file for key, tensor in source.tensors.items()}
    shapes = {key: tensor.shape for key, tensor in source.tensors.items()}
    return BaseMaps(_numbered(files), None, shapes)


def read_maps(directory: Path | None) -> BaseMaps:
    """Return the maps in ``.hf_metadata``. Raises :class:`CheckpointUnusable` for a map in another format."""
    if directory is None:
        return BaseMaps()
    index = _read_map(directory, FILE_INDEX_MAP)
    dtype_names = _read_map(directory, DTYPE_MAP)
    expected = _read_map(directory, EXPECTED_TENSORS)
    config = _read_map(directory, "config.json") or {}
    # A bool is an int for isinstance, but no file number.
    numbers = list((index or {}).values())
    if index is not None and all(isinstance(value, str) for value in numbers):
        # Other programs write file names.
        index = _numbered(index)
    elif not all(type(value) is int and value > 0 for value in numbers):
        where = directory / FILE_INDEX_MAP
        raise unusable("this map does not give file numbers from 1", where, "see the map")
    dtypes = None
    if dtype_names is not None:
        dtypes = {fqn: dtype_code(str(name)) for fqn, name in dtype_names.items()}
    shapes = {}
    float32_in = {}
    for fqn, entry in (expected or {}).items():
        try:
            shapes[fqn] = sizes_of(entry["shape"])
            codes = frozenset(map(text, entry.get("float32_in", [])))
            if not isinstance(entry.get("float32_in", []), list):
                raise TypeError("float32_in")
        except (KeyError, TypeError, ValueError, AttributeError):
            where = directory / EXPECTED_TENSORS
            raise unusable(f"this map is damaged for {fqn!r}", where, repr(entry)[:200]) from None
        if codes:
            float32_in[fqn] = codes
    return BaseMaps(
        index,
        dtypes,
        None if expected is None else shapes,
        bool(config.get("tie_word_embeddings", False)),
        is_adapter=(directory / layout.ADAPTER_CONFIG).is_file(),
        float32_in=float32_in,
    )


def _read_map(directory: Path, name: str) -> ValueDict | None:
    path = directory / name
    try:
        # From the parent: the directory itself must not be a link either.
        content = read_safely(directory.parent, f"{directory.name}/{name}", limit=_MAX_MAP_BYTES)
        value = parse_json(content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise unusable("this side file cannot be read", path, repr(error)[:300]) from None
    if not isinstance(value, dict):
        raise unusable("this side file is not a JSON mapping", path, type(value).__name__)
    return value


def _numbered(files: Texts) -> dict[str, int]:
    """Return {tensor name: file number}. Files are numbered in the order of their names."""
    numbers = {name: number for number, name in enumerate(sorted(set(files.values())), start=1)}
    return {fqn: numbers[name] for fqn, name in files.items()}
