"""Rank manifests: what each rank wrote, and how rank 0 merges them into the manifest of the checkpoint.

For an asynchronous save, rank 0's writer process merges them: with thousands of tensors it takes as long as a training
step. Imports no torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint import commit, layout
from automodel_ckpt.checkpoint.digests import FileRecord
from automodel_ckpt.checkpoint.manifest import (
    Blob,
    Manifest,
    Tree,
    blob_of,
    sizes_of,
    tensor_of,
)
from automodel_ckpt.checkpoint.merkle import merkle_digest, slices_by_file
from automodel_ckpt.checkpoint.slices import Tensor
from automodel_ckpt.checkpoint.writing.reuse import Previous, ReusableFiles
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed


@dataclass(frozen=True, slots=True)
class DcpItem:
    """Where torch's own reader finds an item of a ``.distcp`` file; *offsets* is None for a value that is no tensor."""

    fqn: str
    offsets: tuple[int, ...] | None
    file: str
    start: int
    nbytes: int


@dataclass(slots=True)
class RankTree:
    """What one rank wrote of a tree. Each tensor has one slice."""

    tensors: list[Tensor] = field(default_factory=list)
    objects: list[Blob] = field(default_factory=list)
    dcp_items: list[DcpItem] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class RankManifest:
    """What one rank wrote of a checkpoint. Rank 0 merges those of all ranks into the manifest.

    *placed* has, for each file that several ranks write and this one created, its size and the digest of its header.
    *reused* names the files that several ranks write, and to which this one wrote nothing, because the previous
    checkpoint has all its slices (``reuse.py``). The names of the fields are keys of the file.
    """

    rank: int
    files: dict[str, FileRecord] = field(default_factory=dict)
    trees: dict[str, RankTree] = field(default_factory=dict)
    placed: dict[str, FileRecord] = field(default_factory=dict)
    reused: list[str] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        return json.dumps(self, default=_fields).encode()

    def tensors_in(self, file: str) -> list[Tensor]:
        """The slices of this rank in *file*: tensors with one slice each."""
        found: list[Tensor] = []
        for tree in self.trees.values():
            for tensor in (*tree.tensors, *tree.copies):
                if tensor.slices[0].file == file:
                    found.append(tensor)
        return found

    @classmethod
    def parse(cls, data: bytes) -> RankManifest:
        raw = json.loads(data)
        return cls(
            rank=raw["rank"],
            files=_parse_records(raw["files"]),
            placed=_parse_records(raw["placed"]),
            reused=list(raw["reused"]),
            trees={name: _parse_tree(tree) for name, tree in raw["trees"].items()},
        )


def _fields(record: Any) -> dict[str, Any]:
    """The fields of a dataclass, without recursion and copies as in dataclasses.asdict: there are thousands."""
    # The records are dataclasses with slots=True and no base class, so that __slots__ has all
    # fields.
    return {name: getattr(record, name) for name in record.__slots__}


def _parse_records(raw: Mapping[str, Any]) -> dict[str, FileRecord]:
    return {path: FileRecord(**record) for path, record in raw.items()}


def _parse_tree(raw: Mapping[str, Any]) -> RankTree:
    return RankTree(
        tensors=[tensor_of(tensor["fqn"], tensor) for tensor in raw["tensors"]],
        copies=[tensor_of(tensor["fqn"], tensor) for tensor in raw["copies"]],
        objects=[blob_of(blob) for blob in raw["objects"]],
        dcp_items=[_parse_dcp_item(item) for item in raw["dcp_items"]],
    )


def _parse_dcp_item(raw: Mapping[str, Any]) -> DcpItem:
    offsets = None if raw["offsets"] is None else sizes_of(raw["offsets"])
    return DcpItem(raw["fqn"], offsets, raw["file"], raw["start"], raw["nbytes"])


def rank_manifest_paths(staging: Path, num_ranks: int) -> list[Path]:
    """The paths of the rank manifests, in the order of the ranks."""
    return [staging / layout.rank_manifest_file(rank) for rank in range(num_ranks)]


def read_rank_manifests(staging: Path, num_ranks: int) -> list[RankManifest]:
    """Read the rank manifests, in the order of the ranks. Raises OSError where one is missing."""
    paths = rank_manifest_paths(staging, num_ranks)
    return [RankManifest.parse(path.read_bytes()) for path in paths]


def merge_files(rank_manifests: Iterable[RankManifest]) -> dict[str, FileRecord]:
    """The files that one rank wrote, of all ranks, sorted by name."""
    files: dict[str, FileRecord] = {}
    for written in rank_manifests:
        files.update(written.files)
    return dict(sorted(files.items()))


def merge_shared_files(
    rank_manifests: Iterable[RankManifest], tensors: Iterable[Tensor]
) -> dict[str, FileRecord]:
    """The records of the files that several ranks wrote, from the digests of their headers and slices."""
    slices = slices_by_file(tensors)
    files: dict[str, FileRecord] = {}
    for written in rank_manifests:
        for path, header in written.placed.items():
            digest = merkle_digest(header.digest, slices.get(path, ()))
            files[path] = FileRecord(header.size, digest)
    return files


def merge_tree(
    name: str, format: str, rank_manifests: Iterable[RankManifest], tied: Mapping[str, str]
) -> Tree:
    """The tree *name*, merged from the rank manifests."""
    tensors: list[Tensor] = []
    copies: list[Tensor] = []
    objects: dict[str, Blob] = {}
    for manifest in rank_manifests:
        written = manifest.trees.get(name)
        if written is None:
            continue
        tensors += written.tensors
        copies += written.copies
        for blob in written.objects:
            objects[blob.fqn] = blob
    merged = _merge_tensors(tensors)
    return Tree(format, merged, objects, dict(tied), _merge_tensors(copies))


def _merge_tensors(written: Iterable[Tensor]) -> dict[str, Tensor]:
    """Tensors with the slices of all ranks, by FQN."""
    merged: dict[str, Tensor] = {}
    for tensor in written:
        slices = tensor.slices
        previous = merged.get(tensor.fqn)
        if previous is not None:
            slices = previous.slices + slices
        merged[tensor.fqn] = Tensor(tensor.fqn, tensor.dtype, tensor.shape, slices)
    return merged


def readable_bytes(manifest: Manifest, checkpoint: Path) -> bytes:
    """Serialize *manifest*, and read it back in the way that a resume reads it.

    Raises :class:`SaveFailed` where a reader would reject it: a checkpoint that cannot be read is never published.
    *checkpoint* is its final path, for the message.
    """
    data = manifest.to_bytes()
    try:
        Manifest.parse(data, checkpoint / layout.MANIFEST)
    except CheckpointUnusable as unreadable:
        problem = unreadable.problems[0]
        raise SaveFailed(
            "the checkpoint is not published, because it could not be read back",
            where=problem.where,
            value=f"{problem.what}: {problem.value}",
            hint="earlier checkpoints are unchanged; please report this",
        ) from unreadable
    return data


def finalize(
    staging: Path,
    partial_manifest: Manifest,
    rank_manifests: Sequence[RankManifest],
    previous: Previous | None = None,
) -> int:
    """Complete the manifest and finalize *staging* with it; return the bytes of the checkpoint's files.

    *partial_manifest* has no files, and of each tree only its format and tied names. *previous* is the checkpoint whose
    files the ranks reused. Raises OSError, and :class:`SaveFailed` where the result is not a checkpoint that can be
    read back.
    """
    trees: dict[str, Tree] = {}
    stored: list[Tensor] = []
    for name, partial_tree in partial_manifest.trees.items():
        tree = merge_tree(name, partial_tree.format, rank_manifests, partial_tree.tied)
        trees[name] = tree
        stored.extend(tree.stored)
    files = merge_files(rank_manifests) | merge_shared_files(rank_manifests, stored)
    _complete_reused(staging, files, rank_manifests, previous)
    manifest = replace(partial_manifest, created=time.time(), trees=trees, files=files)
    checkpoint = staging.parent / str(layout.CheckpointName(manifest.step, manifest.epoch))
    commit.finalize(staging, readable_bytes(manifest, checkpoint))
    return manifest.nbytes


def _complete_reused(
    staging: Path,
    files: Mapping[str, FileRecord],
    rank_manifests: Sequence[RankManifest],
    previous: Previous | None,
) -> None:
    """Take over what the ranks did not write because *previous* has it; *files* has the records of all files."""
    reused: dict[str, list[RankManifest]] = {}
    for written in rank_manifests:
        for file in written.reused:
            reused.setdefault(file, []).append(written)
    if not reused:
        return
    reusable = ReusableFiles.open(previous)
    if reusable is None:
        raise SaveFailed(
            "the checkpoint whose files the new one shares was removed during the save",
            where=str(staging),
            value=previous.root if previous else "no checkpoint",
            hint="run the same command to resume from the newest checkpoint",
        )
    for file, ranks in reused.items():
        tensors: list[Tensor] = []
        for written in ranks:
            tensors += written.tensors_in(file)
        needs_head = any(file in written.placed for written in ranks)
        reusable.complete(file, files[file], tensors, staging, needs_head=needs_head)
