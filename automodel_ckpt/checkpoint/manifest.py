"""MANIFEST.json: the contents of a checkpoint. It is written last, so a checkpoint with a manifest is complete.

It lists every file (size, digest), every tensor (dtype, shape, its slices and the position of their bytes), every
pickled value, the recipe attributes they belong to, the environment, and its own digest. docs/format.md describes the
format. Nothing here imports torch or trusts its input: a manifest that does not match the format exactly raises
:class:`CheckpointUnusable`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.digests import FileRecord, digest_of
from automodel_ckpt.checkpoint.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.safe_open import open_regular, open_safely
from automodel_ckpt.checkpoint.json_values import flag, integer, mapping, seconds, text
from automodel_ckpt.checkpoint.slices import (
    ComputedSlices,
    Slice,
    Tensor,
    contiguous_slices,
    interleaving_fault,
    nbytes_of,
    shape_fault,
    tiling_fault,
)
from automodel_ckpt.checkpoint.tree import Blob as Blob
from automodel_ckpt.checkpoint.tree import Tree as Tree
from automodel_ckpt.checkpoint.tree import tree_of, tree_to_json, uses_table
from automodel_ckpt.errors import CheckpointUnusable

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.slice_table import Read, SliceTable

FORMAT = "automodel_ckpt"
FORMAT_VERSION = 2
"""The newest version. A manifest without slice tables has version 1, which older programs read."""
# The bytes of the tensors are no measure for this limit: the manifest of many tiny tensors is larger than their data.
MAX_BYTES = 1 << 29
# The scope of an attribute whose state is not in the checkpoint.
NOT_SAVED = "not saved"
# The bytes of a row, and of a segment in the head, of a slice table.
ROW_BYTES, SEGMENT_BYTES = 20, 48
# Prefix of the Merkle digest of a file that several ranks wrote (merkle.py).
COMPOSED = "xxh3_128_parts:"
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
_TAIL = b'"digest": "%s"\n}\n'
_TAIL_BYTES = len(_TAIL % digest_of(b"").encode())


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
        return cls.parse(_read_bounded(path), path)

    @classmethod
    def parse(cls, data: bytes, path: Path | str) -> Summary:
        """Parse the summary of a manifest; *path* is for error messages. Raises :class:`CheckpointUnusable`."""
        with _reporting_malformed(path):
            raw = _checked_json(data, path)
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

        Of slice tables, only the heads are read.
        """
        path = checkpoint / layout.MANIFEST
        manifest = cls.parse(_read_bounded(path), path)
        has_tables = any(tree.table is not None for tree in manifest.trees.values())
        if has_tables and (fault := manifest.overlap_fault(with_tables=True)):
            raise _unusable("the manifest is inconsistent", path, fault)
        return manifest

    @classmethod
    def parse(cls, data: bytes, path: Path | str, read: Read | None = None) -> Manifest:
        """Parse a manifest; *path* is for error messages. Raises :class:`CheckpointUnusable`.

        Slice tables are not read until slices are. *read* reads them; by default from the directory of *path*.
        """
        with _reporting_malformed(path):
            reader = read or partial(_read_range, Path(path).parent)
            manifest = _from_json(_checked_json(data, path), reader, os.path.dirname(path))
        fault = manifest.fault()
        if fault is not None:
            raise _unusable("the manifest is inconsistent", path, fault)
        return manifest

    def to_bytes(self) -> bytes:
        """Return the content of the file. The last line has the digest of everything before it."""
        # The digest is on the last line, so that a reader can compare it before it parses anything.
        body = json.dumps(_to_json(self), ensure_ascii=True, separators=(",", ":"), allow_nan=True)
        head = body[:-1].encode() + b",\n"
        return head + _TAIL % digest_of(head).encode()

    def fault(self) -> str | None:
        """The first inconsistency in the manifest, or None."""
        for path, record in self.files.items():
            if reason := layout.unsafe_path(path):
                return f"the file name {path!r}: {reason}"
            if record.size < 0:
                return f"the size of {path!r} is {record.size}"
        for name, tree in self.trees.items():
            if reason := self._tree_fault(name, tree):
                return reason
        if reason := self.overlap_fault() or self._gap_fault():
            return reason
        for state_record in self.state.values():
            for file in state_record.files:
                if file not in self.files:
                    return f"{file!r} is not among the files"
        return None

    def _tree_fault(self, name: str, tree: Tree) -> str | None:
        for tensor in tree.stored:
            if tensor.dtype not in DTYPE_BITS:
                return f"{name}: the tensor {tensor.fqn!r} has the unknown dtype {tensor.dtype!r}"
            if reason := _slices_fault(tensor):
                return f"{name}: the tensor {tensor.fqn!r} of shape {list(tensor.shape)}: {reason}"
            if piece := self._misplaced(tensor):
                return f"{name}: the slice at {list(piece.offsets)} of {tensor.fqn!r} is not in {piece.file!r}"
        for blob in tree.objects.values():
            if not self._is_in_file(blob):
                return f"{name}: the value {blob.fqn!r} is not in {blob.file!r}"
        for alias, stored in tree.tied.items():
            if stored not in tree.tensors:
                return f"{name}: {alias!r} is tied to {stored!r}, which is not stored"
        return None if tree.table is None else self._table_fault(name, tree.table)

    def _table_fault(self, name: str, table: SliceTable) -> str | None:
        """Return why the file of a table cannot have the rows of its tensors; None if it can."""
        record = self.files.get(table.location.file)
        head_bytes = table.location.head_bytes
        file_bytes = head_bytes + table.num_rows * ROW_BYTES
        if record is None or record.size != file_bytes or head_bytes % SEGMENT_BYTES:
            return (
                f"{name}: {table.location.file!r} is not the table of its {table.num_rows} slices"
            )
        for file in table.files:
            if file not in self.files:
                return f"{name}: {file!r} is not among the files"
        return None

    def _misplaced(self, tensor: Tensor) -> Slice | None:
        """Return the first slice with a wrong size or outside of its file; None if there is none."""
        if isinstance(tensor.slices, ComputedSlices):
            whole = tensor.slices.whole
            return None if whole is None or self._is_in_file(whole) else whole
        for piece in tensor.slices:
            if piece.nbytes != nbytes_of(piece.dtype, piece.sizes):
                return piece
        for piece in contiguous_slices(tensor):
            if not self._is_in_file(piece):
                return piece
        return None

    def overlap_fault(self, *, with_tables: bool = False) -> str | None:
        """Describe the first two slices or values that share bytes of a file; None if there are none.

        *with_tables*: the slices in tables are compared, too. Raises :class:`CheckpointUnusable` for a damaged table.
        """
        parts: list[Slice | Blob] = []
        for name, tree in self.trees.items():
            parts += [blob for blob in tree.objects.values() if blob.nbytes]
            for tensor in tree.stored:
                parts += [piece for piece in _byte_ranges(tensor) if piece.nbytes]
            if with_tables and tree.table is not None:
                # Slices in a segment do not overlap: each begins after the one before.
                for file, start, stop in tree.table.byte_ranges():
                    if stop > self.files[file].size:
                        return f"the slices of {name!r} exceed {file!r}"
                    # A segment of empty slices can begin where another slice does.
                    if stop > start:
                        parts.append(Blob(f"slices of {name}", file, start, stop - start, ""))
        parts.sort(key=lambda part: (part.file, part.start))
        for one, other in itertools.pairwise(parts):
            if one.file == other.file and one.start + one.nbytes > other.start:
                return f"{one.fqn!r} and {other.fqn!r} share bytes of {one.file!r}"
        return None

    def _gap_fault(self) -> str | None:
        """Describe the first gap between slices of a file with a Merkle digest; None if there is none.

        A Merkle digest does not cover bytes in gaps, so damage there would not be detected.
        """
        sizes = self._sizes_of_merkle_files()
        slices_of: dict[str, list[Slice]] = {path: [] for path in sizes}
        for tree in self.trees.values():
            for tensor in tree.stored:
                for piece in _byte_ranges(tensor):
                    if piece.nbytes and piece.file in slices_of:
                        slices_of[piece.file].append(piece)
        for path, pieces in slices_of.items():
            if not pieces:
                continue
            pieces.sort(key=lambda piece: piece.start)
            # Each slice must end where the next one starts, and the last one where the file ends.
            stops = [piece.start + piece.nbytes for piece in pieces]
            next_starts = [piece.start for piece in pieces[1:]]
            if stops != [*next_starts, sizes[path]]:
                return f"the slices of {path!r} do not fill it"
        for tree in self.trees.values():
            for blob in tree.objects.values():
                if blob.file in slices_of:
                    return f"{blob.fqn!r} is located in {blob.file!r}, among slices"
        return None

    def _sizes_of_merkle_files(self) -> dict[str, int]:
        sizes = {}
        for path, record in self.files.items():
            if record.digest.startswith(COMPOSED):
                sizes[path] = record.size
        return sizes

    def _is_in_file(self, piece: Slice | Blob) -> bool:
        """Whether the bytes of a slice or value are within its file."""
        record = self.files.get(piece.file)
        if record is None or piece.start < 0:
            return False
        return 0 <= piece.nbytes <= record.size - piece.start

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


def _slices_fault(tensor: Tensor) -> str | None:
    """Return why the slices of a tensor do not make it up; None if they do."""
    if isinstance(tensor.slices, ComputedSlices):
        return shape_fault(tensor.shape)  # A formula divides a tensor completely.
    boxes = [piece.box for piece in tensor.slices]
    return tiling_fault(boxes, tensor.shape) or interleaving_fault(tensor)


def _byte_ranges(tensor: Tensor) -> Sequence[Slice]:
    """Return the byte ranges of a tensor that the manifest itself describes: none for slices in a table."""
    if not isinstance(tensor.slices, ComputedSlices):
        return contiguous_slices(tensor)
    whole = tensor.slices.whole
    return () if whole is None else (whole,)


def _is_saved_optimizer(record: Mapping[str, Any]) -> bool:
    is_optimizer = record["kind"] == "optimizer"
    return bool(is_optimizer and record["scope"] != NOT_SAVED)


@contextlib.contextmanager
def _reporting_malformed(path: Path | str) -> Iterator[None]:
    """Raise :class:`CheckpointUnusable` for the errors that parsing malformed content raises."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _unusable("the manifest is malformed", path, repr(error)) from error


def _unusable(what: str, path: Path | str, value: object) -> CheckpointUnusable:
    return CheckpointUnusable(
        what, where=str(path), value=value, hint="use another checkpoint of this run"
    )


def _read_bounded(path: Path) -> bytes:
    """Read a regular file of at most MAX_BYTES. Raises :class:`CheckpointUnusable`."""
    try:
        descriptor = open_regular(path)
        with os.fdopen(descriptor, "rb") as file:
            _check_size(os.fstat(descriptor).st_size, path)
            return file.read()
    except FileNotFoundError as error:
        if path.parent.is_symlink() and not path.parent.exists():
            target = os.readlink(path.parent)
            raise _unusable(
                "the checkpoint is a link to a directory that is not there", path.parent, target
            ) from error
        raise _unusable(
            "there is no manifest: the checkpoint is incomplete", path, "no such file"
        ) from error
    except OSError as error:
        # read() can fail, too (EIO): a bare OSError on one rank would leave the others waiting.
        raise _unusable("the manifest cannot be read", path, error.strerror) from error


def _read_range(root: Path, file: str, start: int, nbytes: int) -> bytes:
    """Read bytes of a regular file below *root*. Raises OSError."""
    with os.fdopen(open_safely(root, file), "rb") as opened:
        opened.seek(start)
        return opened.read(nbytes)


def _check_size(num_bytes: int, path: Path | str) -> None:
    if num_bytes > MAX_BYTES:
        raise _unusable(
            "the manifest is too large", path, f"{num_bytes} bytes; at most {MAX_BYTES} are read"
        )


def _checked_json(data: bytes, path: Path | str) -> dict[str, Any]:
    """Parse *data*, whose last line has the digest of everything before it."""
    _check_size(len(data), path)
    head, tail = data[:-_TAIL_BYTES], data[-_TAIL_BYTES:]
    # Before the digest: a later version may end in another way, which is not damage.
    version = _claimed_version(data)
    if version is not None and version > FORMAT_VERSION:
        raise _unusable(
            "the checkpoint has a newer format than this version supports",
            path,
            f"version {version}",
        )
    if tail != _TAIL % digest_of(head).encode():
        raise _unusable(
            "the manifest is damaged: its digest does not match", path, f"{len(data)} bytes"
        )
    try:
        raw = parse_json(data)
    except ValueError as error:
        raise _unusable("the manifest cannot be parsed", path, str(error)[:300]) from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise _unusable("the file is not a manifest of this format", path, "not " + FORMAT)
    return raw


def _claimed_version(data: bytes) -> int | None:
    """The format version, which every version writes first and in the same format; None for other content."""
    prefix = b'{"format":"%s","format_version":' % FORMAT.encode()
    if not data.startswith(prefix):
        return None
    digits = data[len(prefix) : len(prefix) + 10].split(b",")[0]
    return int(digits) if digits.isdigit() else None


def _to_json(manifest: Manifest) -> dict[str, Any]:
    is_large = any(uses_table(tree) for tree in manifest.trees.values())
    raw = {"format": FORMAT, "format_version": FORMAT_VERSION if is_large else 1}
    raw |= {name: getattr(manifest, name) for name in _PLAIN_FIELDS}
    raw["state"] = {name: asdict(record) for name, record in manifest.state.items()}
    raw["trees"] = {name: tree_to_json(tree) for name, tree in manifest.trees.items()}
    raw["files"] = {path: asdict(record) for path, record in manifest.files.items()}
    return raw


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
        files={path: _file_record(record) for path, record in raw["files"].items()},
        digest=text(raw["digest"]),
        format_version=integer(raw["format_version"]),
    )


def _state_record(raw: Mapping[str, Any]) -> StateRecord:
    names = {name: text(raw[name]) for name in ("kind", "scope", "path")}
    return StateRecord(
        **names, files=tuple(map(text, raw["files"])), aliases=tuple(map(text, raw["aliases"]))
    )


def _file_record(raw: Mapping[str, Any]) -> FileRecord:
    return FileRecord(integer(raw["size"]), text(raw["digest"]))
