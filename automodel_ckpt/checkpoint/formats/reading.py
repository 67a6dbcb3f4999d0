"""Read a tree: PyTorch DCP plans which parts of which slices a rank needs, and they are read in place.

Used for all formats, because the manifest has the position of every slice's raw bytes. Pickles are read only for
values that are not tensors, by a reader of plain data (``files/pickle_reader.py``).
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from automodel_ckpt.checkpoint.files import pickle_reader
from automodel_ckpt.checkpoint.files.safe_open import open_safely, read_safely
from automodel_ckpt.checkpoint.formats.planning import DTYPE_CODES, DTYPES
from automodel_ckpt.checkpoint.manifest import Blob, Tree
from automodel_ckpt.checkpoint.slices import Box, Slice, Tensor, in_one_piece, nbytes_of, overlap
from automodel_ckpt.errors import CheckpointUnusable

_REMEDY = "use another checkpoint of this run (`ckpt ls`)"


class _Planner(DefaultLoadPlanner):
    """DCP's planner, except that values which are no tensors are unpickled by a reader that runs no code."""

    def __init__(self) -> None:
        super().__init__(
            flatten_state_dict=False, flatten_sharded_tensors=False, allow_partial_load=True
        )

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        fqn = read_item.dest_index.fqn
        self.original_state_dict[fqn] = pickle_reader.load(value.getvalue(), fqn)


def read_value(checkpoint: Path, file: str) -> Any:
    """The plain data in a file that ``torch.save`` wrote.

    Raises :class:`CheckpointUnusable` for any other content, OSError where it is not a regular file of the checkpoint.
    """
    return pickle_reader.load(read_safely(checkpoint, file), str(checkpoint / file))


def read_object(checkpoint: Path, tree: Tree, name: str) -> Any:
    """The plain value that a tree has under *name*. Raises :class:`CheckpointUnusable` naming the file."""
    with _Files(checkpoint) as files:
        return pickle_reader.load(files.read_blob(tree.objects[name]), name)


def metadata_of(tree: Tree) -> Metadata:
    """The tree in the format of DCP's planner."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        fqn: TensorStorageMetadata(
            properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
            size=torch.Size(tensor.shape),
            chunks=[
                ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes))
                for p in in_one_piece(tensor)
            ],
        )
        for fqn, tensor in tree.tensors.items()
    }
    described.update({fqn: BytesStorageMetadata() for fqn in tree.objects})
    return Metadata(described)


def read_tree(checkpoint: Path, tree: Tree, state_dict: dict[str, Any]) -> None:
    """Fill a (flat) *state_dict* with what the tree holds under its keys: tensors in place, other values replaced.

    Keys that the tree lacks stay as they are: compare first (:func:`differences`). Needs no other rank. Raises
    :class:`CheckpointUnusable` naming the file.
    """
    planner = _Planner()
    planner.set_up_planner(state_dict, metadata_of(tree))
    plan = planner.create_local_plan()
    pieces = {
        (piece.fqn, piece.offsets): piece
        for tensor in tree.tensors.values()
        for piece in in_one_piece(tensor)
    }
    with _Files(checkpoint) as files:
        for item in sorted(plan.items, key=lambda item: _position(item, pieces, tree)):
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(
                    item, io.BytesIO(files.read_blob(tree.objects[item.storage_index.fqn]))
                )
            else:
                files.read_into(pieces[_index(item)], item, planner.resolve_tensor(item))


def _index(item: ReadItem) -> tuple[str, tuple[int, ...]]:
    return item.storage_index.fqn, tuple(item.storage_index.offset or ())


def _position(
    item: ReadItem, pieces: Mapping[tuple[str, tuple[int, ...]], Slice], tree: Tree
) -> tuple[str, int]:
    """(file, byte) of an item, to read in the order of the disk."""
    place = (
        tree.objects[item.storage_index.fqn]
        if item.type == LoadItemType.BYTE_IO
        else pieces[_index(item)]
    )
    return place.file, place.start


class _Files:
    """The files of a checkpoint, each opened once."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._open: dict[str, int] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def read_blob(self, blob: Blob) -> bytes:
        data = bytearray(blob.nbytes)
        self._read(blob.file, memoryview(data), blob.start)
        return bytes(data)

    def read_into(self, piece: Slice, item: ReadItem, target: torch.Tensor) -> None:
        """Copy the part of a stored slice that *item* asks for into *target* (of that part's shape, on any device)."""
        wanted = Box(tuple(item.storage_offsets), tuple(item.lengths))
        stored = Box((0,) * len(piece.sizes), piece.sizes)
        target = target.detach()
        in_place = (
            target.device.type == "cpu"
            and target.is_contiguous()
            and not (target.is_conj() or target.is_neg())
            and DTYPE_CODES.get(target.dtype) == piece.dtype
        )
        buffer = target if in_place else torch.empty(wanted.sizes, dtype=DTYPES[piece.dtype])
        memory = buffer.reshape(-1).view(torch.uint8).numpy().data
        for run in overlap(stored, wanted, nbytes_of(piece.dtype, ())):
            self._read(
                piece.file, memory[run.target : run.target + run.nbytes], piece.start + run.source
            )
        if not in_place:
            target.copy_(buffer)

    def _read(self, file: str, memory: memoryview, start: int) -> None:
        while memory:
            count = os.preadv(self._descriptor(file), [memory], start)
            if count == 0:
                raise CheckpointUnusable(
                    "a file is shorter than the manifest says",
                    where=str(self._checkpoint / file),
                    value=start,
                    hint=_REMEDY,
                )
            memory, start = memory[count:], start + count

    def _descriptor(self, file: str) -> int:
        if file not in self._open:
            self._open[file] = open_safely(self._checkpoint, file)
        return self._open[file]


def differences(tree: Tree, state_dict: Mapping[str, Any]) -> list[str]:
    """The differences between a tree and a flat state dict, one line each; empty where it can be loaded."""
    here = dict(state_dict)
    lines = [f"- {fqn}: saved, but not here" for fqn in _names(tree) if fqn not in here]
    lines += [
        f"+ {fqn}: here, but not saved"
        for fqn in here
        if fqn not in tree.tensors and fqn not in tree.objects
    ]
    for fqn, tensor in tree.tensors.items():
        if fqn in here and (now := _described(here[fqn])) != (saved := _stored(tensor)):
            lines.append(f"~ {fqn}: saved as {saved}, here {now}")
    return lines


def _names(tree: Tree) -> Iterable[str]:
    return [*tree.tensors, *tree.objects]


def _stored(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{DTYPE_CODES.get(value.dtype, str(value.dtype))} {list(value.shape)}"
    return f"a value of type {type(value).__name__}"
