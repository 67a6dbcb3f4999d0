"""What a consolidation reads, opened: a checkpoint of ours, a bare directory of shards, or one of PyTorch DCP.

A checkpoint of ours says all in its manifest. A bare directory of safetensors shards (PyTorch's
HuggingFaceStorageWriter, NeMo AutoModel, a model/ copied alone) says in each header's ``DCP_SHARDING_INFO`` where its
slices belong, and keeps no digests; nor does a directory of PyTorch DCP (``dcp.py``).
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.files.safe_open import is_sparse
from automodel_ckpt.checkpoint.files.safetensors_header import (
    Header,
    read_header,
    read_header_safely,
)
from automodel_ckpt.checkpoint.manifest import Manifest, Tree
from automodel_ckpt.checkpoint.slices import Slice, Tensor, counts, tiling_fault, whole_tensor
from automodel_ckpt.checkpoint.sources.dcp import open_dcp
from automodel_ckpt.checkpoint.sources.source import Source, unusable
from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.units import left_out, values_text

SHARDING_INFO = "DCP_SHARDING_INFO"
MODEL = "model"
FINISHED = "hf"
_SHARD_SUFFIXES = (".safetensors", ".distcp")


def open_source(path: Path) -> Source:
    """The model to export: *path* is a checkpoint, its ``model/`` (or another module's directory), or a bare directory
    of shards.

    Raises :class:`CheckpointUnusable` where there is none, or where what is there contradicts itself.
    """
    if path.is_symlink() and os.path.lexists(path.parent / layout.MANIFEST):
        raise unusable("a checkpoint contains a symbolic link", path, os.readlink(path))
    path = Path(os.path.realpath(path))
    if not path.is_dir():
        raise unusable("there is no such checkpoint directory", path, "not a directory")
    if os.path.lexists(path / layout.MANIFEST):
        return _from_manifest(path, path / MODEL)
    if os.path.lexists(path.parent / layout.MANIFEST):
        return _from_manifest(path.parent, path)
    if layout.is_staging(path.name) or layout.is_staging(path.parent.name):
        raise unusable("this checkpoint was never finished", path, f"it has no {layout.MANIFEST}")
    inner = path / MODEL
    return _from_headers(inner if inner.is_dir() and not _shards(path) else path)


def _from_manifest(checkpoint: Path, directory: Path) -> Source:
    manifest = Manifest.read(checkpoint)
    modules = {
        layout.state_directory(name): name
        for name, r in manifest.state.items()
        if r.kind == "module"
    }
    name = modules.get(directory.name)
    if name is None or name not in manifest.trees:
        raise unusable(
            "this checkpoint holds no such model", directory, f"it holds {sorted(modules)}"
        )
    tree, prefix = manifest.trees[name], f"{directory.name}/"
    if f"{prefix}{layout.ADAPTER_CONFIG}" in manifest.files:
        raise CheckpointUnusable(
            "an adapter checkpoint needs no consolidation",
            where=str(directory),
            value=layout.ADAPTER_MODEL,
            hint="load the directory with peft as it is",
        )
    _check_no_links(checkpoint, (directory.name, f"{prefix}{layout.HF_METADATA}"))
    _check_no_unlisted_files(directory, {path.removeprefix(prefix) for path in manifest.files})
    if tree.format == FINISHED:
        return _finished(checkpoint, directory, manifest, tree)
    used = {piece.file for tensor in tree.tensors.values() for piece in tensor.slices}
    side = f"{prefix}{layout.HF_METADATA}/"
    read = {
        path: record
        for path, record in manifest.files.items()
        if path in used or path.startswith(side)
    }
    notes = [left_out(values_text(n), n)] if (n := len(tree.objects)) else []
    restricted = dataclasses.replace(manifest, files=read, trees={name: tree})
    return Source(checkpoint, directory, tree.tensors, tree.tied, restricted, tuple(notes))


def _finished(checkpoint: Path, directory: Path, manifest: Manifest, tree: Tree) -> Source:
    files = {
        path: record
        for path, record in manifest.files.items()
        if path.startswith(f"{directory.name}/")
    }
    tensors: dict[str, Tensor] = {}
    for path in sorted({piece.file for tensor in tree.stored for piece in tensor.slices}):
        try:
            entries = read_header_safely(checkpoint, path).tensors
        except OSError as error:
            raise unusable(
                "a file of the model cannot be read", checkpoint / path, error.strerror
            ) from error
        tensors |= {
            key: whole_tensor(key, e.dtype, e.shape, path, e.start) for key, e in entries.items()
        }
    restricted = dataclasses.replace(manifest, files=files, trees={directory.name: tree})
    return Source(checkpoint, directory, tensors, {}, restricted, finished=True)


def _check_no_links(root: Path, paths: Iterable[str]) -> None:
    for path in paths:
        if (root / path).is_symlink():
            raise unusable(
                "a checkpoint contains a symbolic link", root / path, os.readlink(root / path)
            )


def _check_no_unlisted_files(directory: Path, known: set[str]) -> None:
    """What the manifest does not name must not get into an export: shards, and side files."""
    side = directory / layout.HF_METADATA
    names = _shards(directory)
    names += [
        os.path.relpath(os.path.join(parent, name), directory)
        for parent, _, ns in os.walk(side)
        for name in ns
    ]
    for name in names:
        if name not in known:
            raise unusable(
                "a file stands here that the manifest does not know", directory / name, name
            )


def _shards(directory: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if name.endswith(_SHARD_SUFFIXES))
    except OSError as error:
        raise unusable(
            "the directory of the shards cannot be read", directory, error.strerror
        ) from error


def _from_headers(directory: Path) -> Source:
    names = _shards(directory)
    if any(name.endswith(".distcp") for name in names):
        return _from_dcp(directory, names)
    if not names:
        raise unusable("there are no shards here", directory, "no *.safetensors file")
    _check_no_links(directory, (*names, layout.HF_METADATA))
    _check_regular_files(directory, names)
    pieces: dict[str, list[Slice]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        header = read_header(directory / name)
        info = _sharding_info(header, directory / name)
        for fqn in header.tensors:
            piece, shape = _slice(fqn, header, info, directory / name)
            pieces.setdefault(fqn, []).append(piece)
            if shape is not None and shapes.setdefault(fqn, shape) != shape:
                raise unusable(
                    f"shards disagree on the shape of {fqn!r}", directory / name, list(shape)
                )
    tensors = {fqn: _whole(fqn, found, shapes.get(fqn), directory) for fqn, found in pieces.items()}
    notes = ["the shards are unchecked: there is no manifest with their digests"]
    if len(shapes) < len(pieces):
        notes.append(
            "the headers do not state global shapes: they are taken from the shards that are here"
        )
    return Source(directory, directory, tensors, notes=tuple(notes))


def _from_dcp(directory: Path, names: Iterable[str]) -> Source:
    _check_no_links(directory, names)
    _check_regular_files(directory, names)
    return open_dcp(directory)


def _check_regular_files(directory: Path, names: Iterable[str]) -> None:
    for name in names:
        status = os.lstat(directory / name)
        if not stat.S_ISREG(status.st_mode):
            raise unusable(
                "this shard is not a regular file", directory / name, stat.filemode(status.st_mode)
            )
        if is_sparse(status):
            raise unusable(
                "this shard is nearly all hole", directory / name, f"{status.st_size} bytes"
            )


def _sharding_info(header: Header, path: Path) -> Mapping[str, Any]:
    text = header.metadata.get(SHARDING_INFO)
    if text is None:
        raise CheckpointUnusable(
            "this file is not a shard: its header does not say where its slices belong",
            where=str(path),
            value=f"no {SHARDING_INFO}",
            hint="whole Hugging Face files need no consolidation; a file that strayed in here must go",
        )
    try:
        info = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise unusable(f"{SHARDING_INFO} is not JSON", path, repr(error)) from None
    if not isinstance(info, dict):
        raise unusable(f"{SHARDING_INFO} is not a mapping", path, type(info).__name__)
    return info


def _slice(
    fqn: str, header: Header, info: Mapping[str, Any], path: Path
) -> tuple[Slice, tuple[int, ...] | None]:
    entry, stated = header.tensors[fqn], info.get(fqn)
    offsets = counts(stated.get("saved_offsets") if isinstance(stated, dict) else None)
    shape = (
        counts(stated.get("global_shape"))
        if isinstance(stated, dict) and "global_shape" in stated
        else None
    )
    if offsets is None or len(offsets) != len(entry.shape):
        raise unusable(
            f"the header does not say where its slice of {fqn!r} belongs", path, repr(stated)[:200]
        )
    piece = Slice(
        fqn, entry.dtype, offsets, entry.shape, path.name, entry.start, entry.end - entry.start
    )
    return piece, shape


def _whole(fqn: str, pieces: list[Slice], shape: tuple[int, ...] | None, directory: Path) -> Tensor:
    dtypes, ranks = {piece.dtype for piece in pieces}, {len(piece.sizes) for piece in pieces}
    where = directory / pieces[-1].file
    if len(dtypes) > 1 or len(ranks) > 1:
        raise unusable(f"shards disagree on the dtype or rank of {fqn!r}", where, sorted(dtypes))
    if shape is None:
        ends = [
            [o + n for o, n in zip(piece.offsets, piece.sizes, strict=True)] for piece in pieces
        ]
        shape = tuple(map(max, zip(*ends, strict=True)))
    if fault := tiling_fault([piece.box for piece in pieces], shape):
        files = ", ".join(sorted({piece.file for piece in pieces}))
        raise unusable(
            f"the slices of {fqn!r} do not make it up: {fault}", directory, f"slices in {files}"
        )
    return Tensor(fqn, pieces[0].dtype, shape, tuple(pieces))
