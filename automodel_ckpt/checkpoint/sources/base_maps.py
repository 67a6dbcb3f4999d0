"""What ``.hf_metadata`` says of the base model: each tensor's file, dtype and shape. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.dtypes import dtype_code
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.slices import counts
from automodel_ckpt.checkpoint.sources.source import Source, unusable

FILE_INDEX_MAP = "fqn_to_file_index_mapping.json"
DTYPE_MAP = "fqn_to_dtype_mapping.json"
EXPECTED_TENSORS = "expected_tensors.json"
MAPS = frozenset({FILE_INDEX_MAP, DTYPE_MAP, EXPECTED_TENSORS})
# A line of a hundred bytes for each of some hundred thousand tensors; parsed it takes up to 25 times as much.
_MAX_MAP_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class BaseMaps:
    """What is known of the base model: per tensor its file (from 1), its dtype, and its shape; None where unknown. Of
    an adapter it is the adapter itself, which is one file under a name of its own."""

    file_index: Mapping[str, int] | None = None
    dtype: Mapping[str, str] | None = None
    shape: Mapping[str, tuple[int, ...]] | None = None
    tie_word_embeddings: bool = False
    is_adapter: bool = False

    @property
    def names(self) -> frozenset[str] | None:
        """The names an export must hold, exactly; None where nothing is known of the base."""
        known = self.shape if self.shape is not None else self.file_index
        return None if known is None else frozenset(known)


def maps_of(source: Source) -> BaseMaps:
    """What is known of the base. Raises as :func:`read_maps`."""
    if not source.finished:
        return read_maps(source.metadata_directory)
    names = sorted({tensor.slices[0].file for tensor in source.tensors.values()})
    index = {key: names.index(tensor.slices[0].file) + 1 for key, tensor in source.tensors.items()}
    return BaseMaps(index, None, {key: tensor.shape for key, tensor in source.tensors.items()})


def read_maps(directory: Path | None) -> BaseMaps:
    """The base's maps in ``.hf_metadata``. Raises :class:`CheckpointUnusable` for a map of another form."""
    if directory is None:
        return BaseMaps()
    index, dtype = _read_map(directory, FILE_INDEX_MAP), _read_map(directory, DTYPE_MAP)
    expected, config = (
        _read_map(directory, EXPECTED_TENSORS),
        _read_map(directory, "config.json") or {},
    )
    return BaseMaps(
        None if index is None else _file_numbers(index, directory / FILE_INDEX_MAP),
        None if dtype is None else {fqn: dtype_code(str(name)) for fqn, name in dtype.items()},
        None if expected is None else _shapes(expected, directory / EXPECTED_TENSORS),
        bool(config.get("tie_word_embeddings", False)),
        is_adapter=(directory / layout.ADAPTER_CONFIG).is_file(),
    )


def _read_map(directory: Path, name: str) -> dict[str, Any] | None:
    path = directory / name
    try:
        value = json.loads(
            read_safely(directory.parent, f"{directory.name}/{name}", limit=_MAX_MAP_BYTES)
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise unusable("this side file cannot be read", path, repr(error)[:300]) from None
    if not isinstance(value, dict):
        raise unusable("this side file is not a JSON mapping", path, type(value).__name__)
    return value


def _file_numbers(raw: Mapping[str, Any], path: Path) -> dict[str, int]:
    """File numbers as they stand; the base's file names (``weight_map``) are numbered in their order."""
    if all(isinstance(value, str) for value in raw.values()):
        number = {name: index for index, name in enumerate(sorted(set(raw.values())), start=1)}
        return {fqn: number[name] for fqn, name in raw.items()}
    if not all(type(value) is int and value > 0 for value in raw.values()):
        raise unusable("this map does not give file numbers from 1", path, "see the map")
    return dict(raw)


def _shapes(raw: Mapping[str, Any], path: Path) -> dict[str, tuple[int, ...]]:
    shapes = {
        fqn: counts(entry.get("shape") if isinstance(entry, dict) else None)
        for fqn, entry in raw.items()
    }
    for fqn, shape in shapes.items():
        if shape is None:
            raise unusable(f"this map gives no shape for {fqn!r}", path, repr(raw[fqn])[:200])
    return {fqn: shape for fqn, shape in shapes.items() if shape is not None}
