"""Safetensors shards: slices of tensors, as PyTorch's HuggingFaceStorageWriter and NeMo AutoModel write them.

``DCP_SHARDING_INFO`` in each header has the tensor of each slice, and its offsets. There are no digests.
A ``model/`` directory of this program without its manifest has this format, too.
"""

from __future__ import annotations

from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import parse_json
from automodel_ckpt.checkpoint.files.safetensors_header import Header, read_header
from automodel_ckpt.checkpoint.files.type_aliases import Shape, Values
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor, counts
from automodel_ckpt.checkpoint.sources.source import Source, check_no_links
from automodel_ckpt.convert.formats.files import (
    check_regular_files,
    faults_of,
    renamed,
    tiled,
)
from automodel_ckpt.convert.formats.format import Format
from automodel_ckpt.convert.formats.hugging_face import SHARDING_INFO, safetensors_in
from automodel_ckpt.convert.formats.nested_state import names_without_wrappers
from automodel_ckpt.errors import unusable

_NO_SHAPES = "the headers do not state global shapes: they are taken from the shards that are here"


class SafetensorsShards(Format):
    """A directory with safetensors files. Register it after the formats of complete safetensors files."""

    name = "safetensors shards"
    has_own_names = True

    def detect(self, path: Path) -> bool:
        return bool(safetensors_in(path))

    def open(self, path: Path) -> Source:
        """Describe the model. Links are never followed: all shards are in one directory."""
        names = safetensors_in(path)
        check_no_links(path, (layout.HF_METADATA,))
        check_regular_files(path, names)
        slices: dict[str, list[Slice]] = {}
        shapes: dict[str, Shape] = {}
        for name in names:
            _add_slices_of(path / name, slices, shapes)
        tensors = {fqn: _tensor(fqn, slices[fqn], shapes.get(fqn), path) for fqn in slices}
        tensors = renamed(tensors, names_without_wrappers(slices))
        return Source(path, path, tensors, notes=(_NO_SHAPES,) if len(shapes) < len(slices) else ())


def _add_slices_of(path: Path, slices: dict[str, list[Slice]], shapes: dict[str, Shape]) -> None:
    """Add the slices in the file *path*, and the global shapes that its header states."""
    header = read_header(path)
    info = _sharding_info(header, path)
    for fqn, entry in header.tensors.items():
        stated = info.get(fqn)
        if not isinstance(stated, dict):
            stated = {}
        offsets = counts(stated.get("saved_offsets"))
        if offsets is None or len(offsets) != len(entry.shape):
            raise unusable(
                f"the header does not state where its slice of {fqn!r} belongs",
                path,
                repr(info.get(fqn))[:200],
            )
        nbytes = entry.end - entry.start
        slices.setdefault(fqn, []).append(
            Slice(fqn, entry.dtype, offsets, entry.shape, path.name, entry.start, nbytes)
        )
        shape = counts(stated.get("global_shape"))
        if shape is not None and shapes.setdefault(fqn, shape) != shape:
            raise unusable(f"shards disagree on the shape of {fqn!r}", path, list(shape))


def _sharding_info(header: Header, path: Path) -> Values:
    text = header.metadata.get(SHARDING_INFO)
    if text is None:
        raise unusable(
            "this file is not a shard: its header does not state where its slices belong",
            path,
            f"no {SHARDING_INFO}",
            "remove the file if it is not one of the shards; complete Hugging Face files need no consolidation",
        )
    with faults_of(path, f"{SHARDING_INFO} is not a JSON mapping"):
        return dict(parse_json(text))


def _tensor(fqn: str, slices: list[Slice], shape: Shape | None, directory: Path) -> Tensor:
    """Return the tensor that the slices make up. Raises :class:`CheckpointUnusable` if they do not tile its shape."""
    dtypes = {stored.dtype for stored in slices}
    if len(dtypes) > 1 or len({len(stored.sizes) for stored in slices}) > 1:
        raise unusable(
            f"shards disagree on the dtype or rank of {fqn!r}",
            directory / slices[-1].file,
            sorted(dtypes),
        )
    # PyTorch's writer states no global shape. Then a missing last shard only makes the tensor
    # smaller, which nothing here can detect: the note _NO_SHAPES reports it.
    shape = _extents(slices) if shape is None else shape
    return tiled(fqn, slices[0].dtype, shape, slices, directory)


def _extents(slices: list[Slice]) -> Shape:
    """Return the smallest shape that contains all slices."""
    ends = [
        [offset + size for offset, size in zip(stored.offsets, stored.sizes, strict=True)]
        for stored in slices
    ]
    return tuple(map(max, zip(*ends, strict=True)))
