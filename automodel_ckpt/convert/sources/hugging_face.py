"""A directory of whole Hugging Face files, as an export or a download leaves it: its tensors, without reading them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.export_manifest import ExportManifest, find_export_manifest
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.files.safetensors_header import read_header, read_header_safely
from automodel_ckpt.checkpoint.files.weight_map import read_weight_map
from automodel_ckpt.checkpoint.slices import Tensor, whole_tensor
from automodel_ckpt.checkpoint.sources.opening import SHARDING_INFO
from automodel_ckpt.checkpoint.sources.source import Source, unusable
from automodel_ckpt.errors import CheckpointUnusable

_MAX_JSON_BYTES = 16 << 20


def is_hf_directory(directory: Path, *, follow_links: bool = False) -> bool:
    """Whether whole safetensors files stand here: an index, or files whose headers do not call them shards.

    Where links are not followed a file that is one counts for nothing; the Hub's cache is made of them.
    """
    if (directory / layout.HF_INDEX).is_file():
        return True
    names = _safetensors(directory)
    try:
        if not names:
            return False
        header = (
            read_header(directory / names[0])
            if follow_links
            else read_header_safely(directory, names[0])
        )
    except (CheckpointUnusable, OSError):
        return False
    return SHARDING_INFO not in header.metadata


def open_hf(directory: Path) -> Source:
    """The model in a directory of Hugging Face files. Where the directory is an export, its index and headers are
    compared with its manifest here, and the slices have digests for those who read them.

    Raises :class:`CheckpointUnusable` where files, index and manifest do not fit together.
    """
    export = find_export_manifest(directory)
    index = read_weight_map(
        directory / layout.HF_INDEX, check_bytes=None if export is None else export.check_bytes
    )
    names = sorted(set(index.values())) if index is not None else _safetensors(directory)
    tensors: dict[str, Tensor] = {}
    for name in names:
        for fqn, tensor in tensors_in(directory, name, export).items():
            if fqn in tensors:
                raise unusable(
                    f"two files hold the tensor {fqn!r}",
                    directory / name,
                    tensors[fqn].slices[0].file,
                )
            tensors[fqn] = tensor
    if index is not None and (
        missing := [f for f, n in index.items() if f not in tensors or not _in(tensors[f], n)]
    ):
        raise unusable(
            "the index names a tensor that is not in its file",
            directory / layout.HF_INDEX,
            missing[0],
        )
    notes = (
        () if export else ("these files are unchecked: there is no manifest with their digests",)
    )
    return Source(directory, directory, tensors, notes=notes, finished=True, export=export)


def read_json(
    directory: Path, name: str, export: ExportManifest | None = None
) -> dict[str, Any] | None:
    """A JSON mapping in *directory*, compared with the manifest of the *export* that it belongs to; None where there is
    no such file. Raises :class:`CheckpointUnusable`."""
    try:
        content = read_safely(directory, name, limit=_MAX_JSON_BYTES)
        if export is not None:
            export.check_bytes(name, content)
        value = json.loads(content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise unusable("this file cannot be read", directory / name, repr(error)[:300]) from error
    if not isinstance(value, dict):
        raise unusable("this file is not a JSON mapping", directory / name, type(value).__name__)
    return value


def _safetensors(directory: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if name.endswith(".safetensors"))
    except OSError as error:
        raise unusable("the directory cannot be read", directory, error.strerror) from error


def tensors_in(
    directory: Path, name: str, export: ExportManifest | None = None
) -> dict[str, Tensor]:
    """The tensors of one file, with the digests of the *export* that it belongs to. Raises
    :class:`CheckpointUnusable`."""
    try:
        if export is not None:
            export.check_header(name)
        header = read_header_safely(directory, name)
    except OSError as error:
        raise unusable(
            "a file of the model cannot be read", directory / name, error.strerror
        ) from error
    if SHARDING_INFO in header.metadata:
        raise unusable("a shard stands among whole files", directory / name, SHARDING_INFO)
    tensors = {
        fqn: whole_tensor(fqn, e.dtype, e.shape, name, e.start) for fqn, e in header.tensors.items()
    }
    if export is None:
        return tensors
    return {fqn: export.with_digests(name, tensor) for fqn, tensor in tensors.items()}


def _in(tensor: Tensor, name: str) -> bool:
    return tensor.slices[0].file == name
