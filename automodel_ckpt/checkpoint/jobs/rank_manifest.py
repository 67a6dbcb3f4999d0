"""Rank manifests: what each rank wrote, and how rank 0 merges them into the manifest of the checkpoint.

A rank writes its regular slices as rows of the table that they belong to (``slice_table.py``): rank 0 only joins them.
For an asynchronous save, rank 0's writer process merges them: with thousands of tensors it takes as long as a training
step. The manifest also names the software and the host. Imports no torch.
"""

from __future__ import annotations

import functools
import io
import json
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from automodel_ckpt.base.version import __version__, version_of
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import FileRecord
from automodel_ckpt.checkpoint.files.type_aliases import Texts, ValueDict, Values
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.sharding import RegularSlices
from automodel_ckpt.checkpoint.parts.slice_table import (
    MIN_TABLE_ROWS,
    Segment,
    SliceTable,
    segment_of,
)
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor, TensorDict, TensorMap
from automodel_ckpt.checkpoint.parts.tree import (
    Blob,
    FileContents,
    Tree,
    blob_of,
    merkle_digest,
    tensor_of,
)
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed, unusable


@dataclass(slots=True)
class RankTree:
    """What one rank wrote of a tree. Each tensor has one slice.

    *rows* has the part and the number of each tensor of a save, by name: its slice becomes a row of the tree's table.
    It is empty for trees with listed slices. With *placed*, the tensors have positions in files of several ranks.
    *segments* are such rows, of a rank manifest that was read.
    """

    tensors: list[Tensor] = field(default_factory=list)
    objects: list[Blob] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    placed: bool = False
    segments: list[Segment] = field(default_factory=list)

    def add(self, entry: Tensor | Blob, digest: str, *, is_copy: bool = False) -> None:
        """Add an *entry*, a value or a tensor with one slice, with the *digest* of its bytes."""
        if isinstance(entry, Blob):
            self.objects.append(replace(entry, digest=digest))
            return
        (stored,) = entry.slices
        slices = (replace(stored, digest=digest),)
        tensors = self.copies if is_copy else self.tensors
        tensors.append(Tensor(entry.fqn, entry.dtype, entry.shape, slices))

    def regular_segments(self) -> list[Segment]:
        """The slices of the regular tensors, as segments of the table."""
        if not self.rows:
            return self.segments
        found = []
        parts: dict[int, list[tuple[int, Slice]]] = {}
        for tensor in (*self.tensors, *self.copies):
            part, number = self.rows[tensor.fqn]
            parts.setdefault(part, []).append((number, tensor.slices[0]))
        for part, numbered in parts.items():
            slices = [stored for _, stored in sorted(numbered, key=lambda item: item[0])]
            found.append(segment_of(slices, part, placed=self.placed))
        return found


@dataclass(slots=True)
class RankManifest:
    """What one rank wrote of a checkpoint. Rank 0 merges the rank manifests of all ranks into the manifest.

    *placed* has, for each file that several ranks write and this one created, its size and the digest of its header.
    The names of the fields are keys of the file.
    """

    rank: int
    files: dict[str, FileRecord] = field(default_factory=dict)
    trees: dict[str, RankTree] = field(default_factory=dict)
    placed: dict[str, FileRecord] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The content of the file: a line of JSON, then the rows of all segments in their order."""
        trees = {}
        rows = []
        for name, tree in self.trees.items():
            segments = tree.regular_segments()
            rows += [segment.rows for segment in segments]
            trees[name] = {
                "tensors": [] if tree.rows else tree.tensors,
                "copies": [] if tree.rows else tree.copies,
                "objects": tree.objects,
                "segments": [
                    [each.part, each.file, each.start, each.stop, len(each.rows)]
                    for each in segments
                ],
            }
        head = {**_fields(self), "trees": trees}
        return b"\n".join([json.dumps(head, default=_fields).encode(), b"".join(rows)])

    @classmethod
    def parse(cls, data: bytes) -> RankManifest:
        head, _, rows = data.partition(b"\n")
        raw = json.loads(head)
        remaining = io.BytesIO(rows)
        return cls(
            rank=raw["rank"],
            files=_parse_records(raw["files"]),
            placed=_parse_records(raw["placed"]),
            trees={name: _parse_tree(tree, remaining) for name, tree in raw["trees"].items()},
        )


def _fields(record: Any) -> ValueDict:
    """The fields of a dataclass, without recursion and copies as in dataclasses.asdict: there are thousands."""
    # The records are dataclasses with slots=True and no base class, so that __slots__ has all
    # fields.
    return {name: getattr(record, name) for name in record.__slots__}


def _parse_records(raw: Values) -> dict[str, FileRecord]:
    return {path: FileRecord(record["size"], record["digest"]) for path, record in raw.items()}


def _parse_tree(raw: Values, rows: IO[bytes]) -> RankTree:
    segments = []
    for part, file, start, stop, num_bytes in raw["segments"]:
        segments.append(Segment(part, file, start, stop, rows.read(num_bytes)))
    return RankTree(
        tensors=[tensor_of(tensor["fqn"], tensor) for tensor in raw["tensors"]],
        copies=[tensor_of(tensor["fqn"], tensor) for tensor in raw["copies"]],
        objects=[blob_of(blob) for blob in raw["objects"]],
        segments=segments,
    )


def rank_manifest_paths(staging: Path, num_ranks: int) -> list[Path]:
    """The paths of the rank manifests, in the order of the ranks."""
    return [staging / layout.rank_manifest_file(rank) for rank in range(num_ranks)]


def read_rank_manifests(staging: Path, num_ranks: int) -> list[RankManifest]:
    """Read the rank manifests, in the order of the ranks. Raises OSError where one is missing."""
    paths = rank_manifest_paths(staging, num_ranks)
    return [RankManifest.parse(path.read_bytes()) for path in paths]


def merge_files(rank_manifests: Iterable[RankManifest]) -> dict[str, FileRecord]:
    """The files that one rank wrote, of all ranks, sorted by name."""
    files = {}
    for written in rank_manifests:
        files.update(written.files)
    return dict(sorted(files.items()))


def merge_shared_files(
    rank_manifests: Iterable[RankManifest], trees: Collection[Tree]
) -> dict[str, FileRecord]:
    """The records of the files in which several ranks wrote slices, from the digests of their headers and slices."""
    contents = FileContents(trees)
    files = {}
    for written in rank_manifests:
        for path, header in written.placed.items():
            digest = merkle_digest(header.digest, contents.listed(path))
            files[path] = FileRecord(header.size, digest)
    return files


def merge_tree(
    name: str,
    format: str,
    rank_manifests: Iterable[RankManifest],
    tied: Texts,
    planned: Tree | None = None,
) -> Tree:
    """The tree *name*, merged from the rank manifests. *planned* has its regular tensors, in the order of their rows.

    Raises :class:`SaveFailed` where the ranks wrote other slices than planned.
    """
    tensors = []
    copies = []
    objects = {}
    segments = {}
    for manifest in rank_manifests:
        written = manifest.trees.get(name)
        if written is None:
            continue
        if not written.rows:
            tensors += written.tensors
            copies += written.copies
        segments[manifest.rank] = written.regular_segments()
        for blob in written.objects:
            objects[blob.fqn] = blob
    if planned is None:
        planned = Tree(format, {}, {})
    table = SliceTable.merged(segments, name) if planned.tensors else None
    merged = _with_records(planned.tensors, table) | {each.fqn: each for each in tensors}
    merged_copies = _with_records(planned.copies, table) | {each.fqn: each for each in copies}
    if table is not None:
        # Compares the number of slices.
        _ = table.segments
    return Tree(format, merged, objects, dict(tied), merged_copies, table)


def _with_records(planned: TensorMap, table: SliceTable | None) -> TensorDict:
    """The planned tensors, with the records of their slices in *table*."""
    found = {}
    for fqn, tensor in planned.items():
        assert table is not None and isinstance(tensor.slices, RegularSlices)
        found[fqn] = table.add(tensor.slices)
    return found


def readable_bytes(manifest: Manifest, checkpoint: Path) -> bytes:
    """Serialize *manifest*, and read it back in the way that a resume reads it.

    Raises :class:`SaveFailed` where a reader would reject it: a checkpoint that cannot be read is never published.
    *checkpoint* is its final path, for the message.
    """
    data = manifest.to_bytes()
    where = checkpoint / layout.MANIFEST
    try:
        Manifest.parse(data, where)
        # The tables are compared in memory: their files are not at the final path yet.
        if fault := manifest.overlap_fault(with_tables=True):
            raise unusable("the manifest is inconsistent", where, fault, "")
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
    trees: Mapping[str, Tree] | None = None,
) -> int:
    """Complete the manifest and finalize *staging* with it; return the bytes of the checkpoint's files.

    *partial_manifest* has no files, and of each tree only its format and tied names. *trees* is the result of
    :func:`merge_trees`, if the caller has it. Raises OSError, and :class:`SaveFailed` where the result is not a
    checkpoint that can be read back.
    """
    if trees is None:
        trees = merge_trees(partial_manifest, rank_manifests)
    files = merge_files(rank_manifests)
    files |= _write_tables(staging, trees)
    files |= merge_shared_files(rank_manifests, trees.values())
    manifest = replace(partial_manifest, created=time.time(), trees=trees, files=files)
    checkpoint = staging.parent / str(layout.CheckpointName(manifest.step, manifest.epoch))
    commit.finalize(staging, readable_bytes(manifest, checkpoint))
    return manifest.nbytes


def merge_trees(
    partial_manifest: Manifest, rank_manifests: Sequence[RankManifest]
) -> dict[str, Tree]:
    """The trees of a manifest, which has their planned tensors, merged from the rank manifests."""
    trees = {}
    for name, tree in partial_manifest.trees.items():
        trees[name] = merge_tree(name, tree.format, rank_manifests, tree.tied, tree)
    return trees


def _write_tables(staging: Path, trees: Mapping[str, Tree]) -> dict[str, FileRecord]:
    """Write the tables of large trees; the manifest lists the slices of the others."""
    written = {}
    for name, tree in trees.items():
        if tree.table is None or tree.table.num_rows < MIN_TABLE_ROWS:
            continue
        file = layout.slice_table_file(layout.state_directory(name))
        written[file] = commit.write_file(staging / file, tree.table.content)
        tree.table.location = tree.table.location._replace(file=file)
    return written


# ---------------------------------------------------------------- software and host


_PACKAGES = ("torch", "transformers", "safetensors", "peft", "datasets", "numpy")


@functools.cache
def environment() -> ValueDict:
    """Interpreter, library versions, host, and the git commit of the working directory (None outside a repository)."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        # An editable install has the metadata of the revision that it was installed from.
        "packages": {
            "automodel-ckpt": __version__,
            **{name: version_of(name) for name in _PACKAGES},
        },
        "git_commit": _git_commit(),
    }


def _git_commit() -> str | None:
    # Not `git status`: it runs programs that .git/config of the directory names, such as filters and monitors.
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
