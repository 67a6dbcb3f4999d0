"""Rank manifests: what each rank wrote of a checkpoint, and how they are merged. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from automodel_ckpt.checkpoint.digests import FileRecord
from automodel_ckpt.checkpoint.manifest import Blob, Tree, blob_of, sizes_of, tensor_of
from automodel_ckpt.checkpoint.merkle import held_by_file, merkle_digest
from automodel_ckpt.checkpoint.slices import Tensor


@dataclass(frozen=True, slots=True)
class DcpItem:
    """Where torch's own reader finds an item of a ``.distcp`` file: *offsets* is None for a value that is no tensor."""

    fqn: str
    offsets: tuple[int, ...] | None
    file: str
    start: int
    nbytes: int


@dataclass(slots=True)
class TreePart:
    """What one rank wrote of a tree."""

    tensors: list[Tensor] = field(default_factory=list)
    objects: list[Blob] = field(default_factory=list)
    dcp_items: list[DcpItem] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class Part:
    """A rank manifest: what one rank wrote of a checkpoint. Rank 0 merges those of all ranks into the manifest.

    *placed* has, for each file that several ranks write and this one created, its size and the digest of its header.
    """

    rank: int
    files: dict[str, FileRecord] = field(default_factory=dict)
    trees: dict[str, TreePart] = field(default_factory=dict)
    placed: dict[str, FileRecord] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        return json.dumps(self, default=_fields).encode()

    @classmethod
    def parse(cls, data: bytes) -> Part:
        raw = json.loads(data)
        return cls(
            rank=raw["rank"],
            files={path: FileRecord(**record) for path, record in raw["files"].items()},
            placed={path: FileRecord(**record) for path, record in raw["placed"].items()},
            trees={name: _tree_part(tree) for name, tree in raw["trees"].items()},
        )


def _fields(record: Any) -> dict[str, Any]:
    """The fields of a dataclass, without recursion and copies as in dataclasses.asdict: there are thousands."""
    return {name: getattr(record, name) for name in record.__slots__}


def merge_files(parts: Iterable[Part]) -> dict[str, FileRecord]:
    """All files of all ranks, by name."""
    return dict(sorted(item for part in parts for item in part.files.items()))


def written_shared_files(parts: Iterable[Part], tensors: Iterable[Tensor]) -> dict[str, FileRecord]:
    """The records of the files that several ranks wrote, from the digests of their headers and slices."""
    held = held_by_file(tensors)
    heads = {path: head for part in parts for path, head in part.placed.items()}
    return {
        p: FileRecord(head.size, merkle_digest(head.digest, held.get(p, ())))
        for p, head in heads.items()
    }


def merge_tree(name: str, format: str, parts: Iterable[Part], tied: Mapping[str, str]) -> Tree:
    """The tree *name*, merged from the rank manifests."""
    written = [part.trees[name] for part in parts if name in part.trees]
    tensors = _merge_tensors(tensor for part in written for tensor in part.tensors)
    copies = _merge_tensors(tensor for part in written for tensor in part.copies)
    return Tree(
        format,
        tensors,
        {blob.fqn: blob for part in written for blob in part.objects},
        dict(tied),
        copies,
    )


def _merge_tensors(found: Iterable[Tensor]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for tensor in found:
        known = tensors.get(tensor.fqn)
        pieces = (known.slices if known else ()) + tensor.slices
        tensors[tensor.fqn] = Tensor(tensor.fqn, tensor.dtype, tensor.shape, pieces)
    return tensors


def _tree_part(raw: Mapping[str, Any]) -> TreePart:
    return TreePart(
        tensors=[tensor_of(tensor["fqn"], tensor) for tensor in raw["tensors"]],
        copies=[tensor_of(tensor["fqn"], tensor) for tensor in raw["copies"]],
        objects=[blob_of(blob) for blob in raw["objects"]],
        dcp_items=[
            DcpItem(
                i["fqn"],
                None if i["offsets"] is None else sizes_of(i["offsets"]),
                i["file"],
                i["start"],
                i["nbytes"],
            )
            for i in raw["dcp_items"]
        ],
    )
