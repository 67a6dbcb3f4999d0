"""MANIFEST.json: the contents of a checkpoint. It is written last, so a checkpoint with a manifest is complete.

It lists every file (size, digest), every tensor (dtype, shape, its slices and the position of their bytes), every
pickled value, the recipe attributes they belong to, the environment, and its own digest. docs/format.md describes the
format, and ``manifest_file`` reads its bytes. Slices must make up their tensors, lie in files, and share no bytes.
Nothing here imports torch or trusts its input: a manifest that does not match the format exactly raises
:class:`CheckpointUnusable`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.digests import OF_SLICES, FileRecord
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.json_values import flag, integer, mapping, seconds, text
from automodel_ckpt.checkpoint.parts.manifest_file import (
    FORMAT,
    decode,
    encode,
    read_bounded,
    read_range,
    reporting_malformed,
    unusable,
)
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor, contiguous_slices, nbytes_of
from automodel_ckpt.checkpoint.parts.tiling import interleaving_fault, shape_fault, tiling_fault
from automodel_ckpt.checkpoint.parts.tree import Blob as Blob
from automodel_ckpt.checkpoint.parts.tree import Tree as Tree
from automodel_ckpt.checkpoint.parts.tree import tree_of, tree_to_json, uses_table

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.parts.slice_table import Read
if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.parts.slice_table import SliceTable


# The bytes of a row, and of a segment in the head, of a slice table.
ROW_BYTES, SEGMENT_BYTES = 20, 48

Files = Mapping[str, FileRecord]
"""The files of a checkpoint, by path."""
Trees = Mapping[str, Tree]
"""The trees of a checkpoint, by the name of their attribute."""

# The scope of an attribute whose state is not in the checkpoint.
NOT_SAVED = "not saved"
_PLAIN_FIELDS = (
    "step",
    "epoch",
    "created",
    "world_size",
    "dp_size",
    "progress",
    "losses",
    "validated",
    "environment",
    "lineage",
)


@dataclass(frozen=True, slots=True)
class StateRecord:
    """How one recipe attribute is stored: its kind, its scope, and its directory or files."""

    kind: str
    scope: str
    path: str
    files: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Summary:
    """The fields of a manifest that are needed to choose and list checkpoints. Tensors are not parsed."""

    step: int
    epoch: int
    created: float
    nbytes: int
    losses: Mapping[str, Any]
    validated: bool
    environment: Mapping[str, Any]
    lineage: Mapping[str, Any]
    has_optimizer: bool
    digest: str

    @classmethod
    def read(cls, checkpoint: Path) -> Summary:
        """Read the summary of the manifest in *checkpoint*, a few times faster than :meth:`Manifest.read`.

        The manifest's own digest is verified. Raises :class:`CheckpointUnusable`.
        """
        path = checkpoint / layout.MANIFEST
        return cls.parse(read_bounded(path), path)

    @classmethod
    def parse(cls, data: bytes, path: Path | str) -> Summary:
        """Parse the summary of a manifest; *path* is for error messages. Raises :class:`CheckpointUnusable`."""
        with reporting_malformed(path):
            raw = decode(data, path)
            sizes = [integer(record["size"]) for record in raw["files"].values()]
            return cls(
                step=integer(raw["step"]),
                epoch=integer(raw["epoch"]),
                created=seconds(raw["created"]),
                nbytes=sum(sizes),
                losses=mapping(raw["losses"]),
                validated=flag(raw["validated"]),
                environment=mapping(raw["environment"]),
                lineage=mapping(raw["lineage"]),
                has_optimizer=any(_is_saved_optimizer(record) for record in raw["state"].values()),
                digest=text(raw["digest"]),
            )


@dataclass(frozen=True, slots=True)
class Manifest:
    """All metadata of a checkpoint."""

    step: int
    epoch: int
    created: float
    world_size: int
    dp_size: int
    progress: Mapping[str, Any]
    losses: Mapping[str, Any]
    validated: bool
    environment: Mapping[str, Any]
    lineage: Mapping[str, Any]
    state: Mapping[str, StateRecord]
    trees: Mapping[str, Tree]
    files: Mapping[str, FileRecord]
    digest: str = ""
    format_version: int = 1

    @classmethod
    def read(cls, checkpoint: Path) -> Manifest:
        """Read the manifest of a checkpoint. Raises :class:`CheckpointUnusable` if it is missing or invalid.

        Only the heads of slice tables are read.
        """
        path = checkpoint / layout.MANIFEST
        manifest = cls.parse(read_bounded(path), path)
        has_tables = any(tree.table is not None for tree in manifest.trees.values())
        if has_tables and (fault := manifest.overlap_fault(with_tables=True)):
            raise unusable("the manifest is inconsistent", path, fault)
        return manifest

    @classmethod
    def parse(cls, data: bytes, path: Path | str, read: Read | None = None) -> Manifest:
        """Parse a manifest; *path* is for error messages. Raises :class:`CheckpointUnusable`.

        Slice tables are not read until slices are. *read* reads them; by default from the directory of *path*.
        """
        with reporting_malformed(path):
            reader = read or partial(read_range, Path(path).parent)
            manifest = _from_json(decode(data, path), reader, os.path.dirname(path))
        fault = manifest.fault()
        if fault is not None:
            raise unusable("the manifest is inconsistent", path, fault)
        return manifest

    def to_bytes(self) -> bytes:
        """Return the content of the file. The last line has the digest of everything before it."""
        return encode(_to_json(self))

    def fault(self) -> str | None:
        """The first inconsistency in the manifest, or None."""
        for path, record in self.files.items():
            if reason := file_fault(path, record):
                return reason
        for name, tree in self.trees.items():
            if reason := tree_fault(name, tree, self.files):
                return reason
        if reason := self.overlap_fault() or gap_fault(self.trees, self.files):
            return reason
        for state_record in self.state.values():
            for file in state_record.files:
                if file not in self.files:
                    return f"{file!r} is not among the files"
        return None

    def overlap_fault(self, *, with_tables: bool = False) -> str | None:
        """Describe the first two slices or values that share bytes of a file; None if there are none.

        *with_tables*: the slices in tables are compared, too. Raises :class:`CheckpointUnusable` for a damaged table.
        """
        return overlap_fault(self.trees, self.files, with_tables=with_tables)

    @property
    def saved(self) -> frozenset[str]:
        """The names, aliases included, of the attributes whose state is in the checkpoint."""
        names: set[str] = set()
        for name, record in self.state.items():
            if record.scope != NOT_SAVED:
                names.update((name, *record.aliases))
        return frozenset(names)

    @property
    def left_out(self) -> frozenset[str]:
        """The names of the attributes that a save left out (``checkpoint.save_optimizer: false``)."""
        return frozenset(name for name, record in self.state.items() if record.scope == NOT_SAVED)

    @property
    def is_imported_run(self) -> bool:
        """Whether the training state of another program was imported (``ckpt import --training-state``)."""
        return "imported_from" in self.lineage and len(self.state) > 1

    @property
    def nbytes(self) -> int:
        """Bytes of all files, without the manifest."""
        return sum(record.size for record in self.files.values())


def _is_saved_optimizer(record: Mapping[str, Any]) -> bool:
    is_optimizer = record["kind"] == "optimizer"
    return bool(is_optimizer and record["scope"] != NOT_SAVED)


def _to_json(manifest: Manifest) -> dict[str, Any]:
    raw = {"format": FORMAT, "format_version": _version_of(manifest)}
    raw |= {name: getattr(manifest, name) for name in _PLAIN_FIELDS}
    raw["state"] = {name: asdict(record) for name, record in manifest.state.items()}
    raw["trees"] = {name: tree_to_json(tree) for name, tree in manifest.trees.items()}
    raw["files"] = {
        path: {"size": record.size, "digest": record.digest}
        for path, record in manifest.files.items()
    }
    return raw


def _version_of(manifest: Manifest) -> int:
    return 2 if any(uses_table(tree) for tree in manifest.trees.values()) else 1


def _from_json(raw: Mapping[str, Any], read: Read, checkpoint: str) -> Manifest:
    trees: dict[str, Tree] = {}
    for name, tree in raw["trees"].items():
        trees[text(name)] = tree_of(tree, read, checkpoint)
    return Manifest(
        step=integer(raw["step"]),
        epoch=integer(raw["epoch"]),
        created=seconds(raw["created"]),
        world_size=integer(raw["world_size"]),
        dp_size=integer(raw["dp_size"]),
        progress=mapping(raw["progress"]),
        losses=mapping(raw["losses"]),
        validated=flag(raw["validated"]),
        environment=mapping(raw["environment"]),
        lineage=mapping(raw["lineage"]),
        state={text(name): _state_record(record) for name, record in raw["state"].items()},
        trees=trees,
        files={
            path: FileRecord(integer(record["size"]), text(record["digest"]))
            for path, record in raw["files"].items()
        },
        digest=text(raw["digest"]),
        format_version=integer(raw["format_version"]),
    )


def _state_record(raw: Mapping[str, Any]) -> StateRecord:
    names = {name: text(raw[name]) for name in ("kind", "scope", "path")}
    return StateRecord(
        **names, files=tuple(map(text, raw["files"])), aliases=tuple(map(text, raw["aliases"]))
    )


def file_fault(path: str, record: FileRecord) -> str | None:
    """Return what is wrong with the record of a file; None if nothing is."""
    if reason := layout.unsafe_path(path):
        return f"the file name {path!r}: {reason}"
    if record.size < 0:
        return f"the size of {path!r} is {record.size}"
    return None


def tree_fault(name: str, tree: Tree, files: Files) -> str | None:
    """Return the first tensor or value of *tree* that its slices or *files* do not make up; None if there is none."""
    for tensor in tree.stored:
        if tensor.dtype not in DTYPE_BITS:
            return f"{name}: the tensor {tensor.fqn!r} has the unknown dtype {tensor.dtype!r}"
        if reason := _slices_fault(tensor):
            return f"{name}: the tensor {tensor.fqn!r} of shape {list(tensor.shape)}: {reason}"
        if misplaced := _misplaced(tensor, files):
            where = list(misplaced.offsets)
            return f"{name}: the slice at {where} of {tensor.fqn!r} is not in {misplaced.file!r}"
    for blob in tree.objects.values():
        if not is_in_file(blob, files):
            return f"{name}: the value {blob.fqn!r} is not in {blob.file!r}"
    for alias, stored in tree.tied.items():
        if stored not in tree.tensors:
            return f"{name}: {alias!r} is tied to {stored!r}, which is not stored"
    return None if tree.table is None else _table_fault(name, tree.table, files)


def _table_fault(name: str, table: SliceTable, files: Files) -> str | None:
    """Return why the file of a table cannot have the rows of its tensors; None if it can."""
    record = files.get(table.location.file)
    head_bytes = table.location.head_bytes
    file_bytes = head_bytes + table.num_rows * ROW_BYTES
    if record is None or record.size != file_bytes or head_bytes % SEGMENT_BYTES:
        return f"{name}: {table.location.file!r} is not the table of its {table.num_rows} slices"
    for file in table.files:
        if file not in files:
            return f"{name}: {file!r} is not among the files"
    return None


def _misplaced(tensor: Tensor, files: Files) -> Slice | None:
    """Return the first slice with a wrong size or outside of its file; None if there is none."""
    if not isinstance(tensor.slices, tuple):
        whole = tensor.slices.whole
        return None if whole is None or is_in_file(whole, files) else whole
    for stored in tensor.slices:
        if stored.nbytes != nbytes_of(stored.dtype, stored.sizes):
            return stored
    for stored in contiguous_slices(tensor):
        if not is_in_file(stored, files):
            return stored
    return None


def overlap_fault(trees: Trees, files: Files, *, with_tables: bool = False) -> str | None:
    """Describe the first two slices or values that share bytes of a file; None if there are none.

    *with_tables*: the slices in tables are compared, too. Raises :class:`CheckpointUnusable` for a damaged table.
    """
    parts: list[Slice | Blob] = []
    for name, tree in trees.items():
        parts += [blob for blob in tree.objects.values() if blob.nbytes]
        for tensor in tree.stored:
            parts += [stored for stored in _byte_ranges(tensor) if stored.nbytes]
        if with_tables and tree.table is not None:
            segments = _segments(name, tree.table)
            for segment in segments:
                if segment.start + segment.nbytes > files[segment.file].size:
                    return f"the slices of {name!r} exceed {segment.file!r}"
            # A segment of empty slices can begin where another slice does.
            parts += [segment for segment in segments if segment.nbytes]
    parts.sort(key=lambda part: (part.file, part.start))
    for one, other in itertools.pairwise(parts):
        if one.file == other.file and one.start + one.nbytes > other.start:
            return f"{one.fqn!r} and {other.fqn!r} share bytes of {one.file!r}"
    return None


def _segments(name: str, table: SliceTable) -> list[Blob]:
    """The byte ranges of the segments of a table. Slices in one do not overlap: each begins after the one before."""
    ranges = table.byte_ranges()
    return [
        Blob(f"slices of {name}", file, start, stop - start, "") for file, start, stop in ranges
    ]


def gap_fault(trees: Trees, files: Files) -> str | None:
    """Describe the first gap between slices of a file with a Merkle digest; None if there is none.

    A Merkle digest does not cover bytes in gaps, so damage there would not be detected.
    """
    slices_of: dict[str, list[Slice]] = {}
    for path, record in files.items():
        if record.digest.startswith(OF_SLICES):
            slices_of[path] = []
    for stored in _stored_slices(trees):
        if stored.nbytes and stored.file in slices_of:
            slices_of[stored.file].append(stored)
    for path, slices in slices_of.items():
        if slices and not _fill(slices, files[path].size):
            return f"the slices of {path!r} do not fill it"
    for tree in trees.values():
        for blob in tree.objects.values():
            if blob.file in slices_of:
                return f"{blob.fqn!r} is located in {blob.file!r}, among slices"
    return None


def _stored_slices(trees: Trees) -> Iterator[Slice]:
    for tree in trees.values():
        for tensor in tree.stored:
            yield from _byte_ranges(tensor)


def _fill(slices: list[Slice], size: int) -> bool:
    """Whether each of *slices* ends where the next one starts, and the last one where a file of *size* bytes ends."""
    slices.sort(key=lambda stored: stored.start)
    stops = [stored.start + stored.nbytes for stored in slices]
    next_starts = [stored.start for stored in slices[1:]]
    return stops == [*next_starts, size]


def is_in_file(stored: Slice | Blob, files: Files) -> bool:
    """Whether the bytes of a slice or value are within its file."""
    record = files.get(stored.file)
    if record is None or stored.start < 0:
        return False
    return 0 <= stored.nbytes <= record.size - stored.start


def _slices_fault(tensor: Tensor) -> str | None:
    """Return why the slices of a tensor do not make it up; None if they do."""
    if not isinstance(tensor.slices, tuple):
        return shape_fault(tensor.shape)  # A formula divides a tensor completely.
    boxes = [stored.box for stored in tensor.slices]
    return tiling_fault(boxes, tensor.shape) or interleaving_fault(tensor)


def _byte_ranges(tensor: Tensor) -> Sequence[Slice]:
    """Return the byte ranges of a tensor that the manifest itself describes: none for slices in a table."""
    if isinstance(tensor.slices, tuple):
        return contiguous_slices(tensor)
    whole = tensor.slices.whole
    return () if whole is None else (whole,)
