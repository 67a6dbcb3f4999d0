"""MANIFEST.json: the contents of a checkpoint. It is written last, so a checkpoint with a manifest is complete.

It lists every file (size, digest), every tensor (dtype, shape, its slices and the position of their bytes), every
pickled value, the recipe attributes they belong to, the environment, and its own digest. docs/format.md describes the
format. Slices must make up their tensors, lie in files, and share no bytes. Nothing here imports torch or trusts its
input: a manifest that does not match the format exactly raises :class:`CheckpointUnusable`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.base.version import __version__, version_of
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.durable_file import OF_SLICES, FileRecord, digest_of
from automodel_ckpt.checkpoint.files.safe_open import (
    flag,
    integer,
    mapping,
    parse_json,
    read_range,
    read_safely,
    seconds,
    text,
)
from automodel_ckpt.checkpoint.files.type_aliases import Shape, ValueDict, Values
from automodel_ckpt.checkpoint.parts.slices import (
    Box,
    Slice,
    Tensor,
    contiguous_slices,
    nbytes_of,
    shape_fault,
    whole_box,
)
from automodel_ckpt.checkpoint.parts.tree import Blob as Blob
from automodel_ckpt.checkpoint.parts.tree import Tree as Tree
from automodel_ckpt.checkpoint.parts.tree import files_of, tree_of, tree_to_json, uses_table
from automodel_ckpt.errors import unusable

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.parts.slice_table import Read, SliceTable

FORMAT = "automodel_ckpt"
FORMAT_VERSION = 2
"""The newest version. A manifest has the lowest version that describes it, so that older programs read it: 2 with slice
tables, else 1. Version 3 had ``checkpoint.files_per_node``, and no program reads it any more: a later one is 4."""
# The bytes of the tensors are no measure for this limit: the manifest of many tiny tensors is larger than their data.
MAX_BYTES = 1 << 29
# The digest is on the last line, so that a reader can compare it before it parses anything.
_TAIL = b'"digest": "%s"\n}\n'
_TAIL_BYTES = len(_TAIL % digest_of(b"").encode())
# The bytes of a row, and of a segment in the head, of a slice table.
ROW_BYTES, SEGMENT_BYTES = 20, 48

Files = Mapping[str, FileRecord]
"""The files of a checkpoint, by path."""

# The scope of an attribute without state in the checkpoint.
NOT_SAVED = "not saved"
_PLAIN_FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "step": integer,
    "epoch": integer,
    "created": seconds,
    "world_size": integer,
    "dp_size": integer,
    "progress": mapping,
    "losses": mapping,
    "validated": flag,
    "environment": mapping,
    "lineage": mapping,
}
"""The conversion of each field that has the same form in JSON."""


@dataclass(frozen=True, slots=True)
class StateRecord:
    """How one recipe attribute is stored: its kind, its scope, and its directory or files."""

    kind: str
    scope: str
    path: str
    files: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Plain:
    """The fields of a manifest that are needed to choose and list checkpoints."""

    step: int
    epoch: int
    created: float
    world_size: int
    dp_size: int
    progress: Values
    losses: Values
    validated: bool
    environment: Values
    lineage: Values


@dataclass(frozen=True, slots=True)
class Summary(_Plain):
    """The fields of a manifest that are needed to choose and list checkpoints. Tensors are not parsed."""

    nbytes: int
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
            raw = _decode(data, path)
            sizes = [integer(record["size"]) for record in raw["files"].values()]
            saved = [record for record in raw["state"].values() if record["scope"] != NOT_SAVED]
            return cls(
                **_plain_fields(raw),
                nbytes=sum(sizes),
                has_optimizer=any(record["kind"] == "optimizer" for record in saved),
                digest=text(raw["digest"]),
            )


@dataclass(frozen=True, slots=True)
class Manifest(_Plain):
    """All metadata of a checkpoint."""

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
        return cls.parse(_read_bounded(path), path, with_tables=True)

    @classmethod
    def parse(
        cls,
        data: bytes,
        path: Path | str,
        read: Read | None = None,
        *,
        with_tables: bool = False,
    ) -> Manifest:
        """Parse a manifest; *path* is for error messages. Raises :class:`CheckpointUnusable`.

        Slice tables are not read until slices are, or their heads *with_tables*. *read* reads them; by default from the
        directory of *path*.
        """
        reader, checkpoint = read or partial(read_range, Path(path).parent), os.path.dirname(path)
        with _reporting_malformed(path):
            raw = _decode(data, path)
            manifest = cls(
                **_plain_fields(raw),
                state={text(name): _state_record(record) for name, record in raw["state"].items()},
                trees={
                    text(name): tree_of(tree, reader, checkpoint)
                    for name, tree in raw["trees"].items()
                },
                files={
                    path: FileRecord(integer(record["size"]), text(record["digest"]))
                    for path, record in raw["files"].items()
                },
                digest=text(raw["digest"]),
                format_version=integer(raw["format_version"]),
            )
        fault = manifest.fault() or manifest.overlap_fault(with_tables=with_tables)
        if fault is not None:
            raise unusable("the manifest is inconsistent", path, fault)
        return manifest

    def to_bytes(self) -> bytes:
        """Return the content of the file. The last line has the digest of everything before it."""
        has_tables = any(uses_table(tree) for tree in self.trees.values())
        raw: ValueDict = {"format": FORMAT, "format_version": 2 if has_tables else 1}
        raw |= {name: getattr(self, name) for name in _PLAIN_FIELDS}
        raw["state"] = {name: asdict(record) for name, record in self.state.items()}
        raw["trees"] = {name: tree_to_json(tree) for name, tree in self.trees.items()}
        raw["files"] = {
            path: {"size": r.size, "digest": r.digest} for path, r in self.files.items()
        }
        body = json.dumps(raw, ensure_ascii=True, separators=(",", ":"), allow_nan=True)
        head = body[:-1].encode() + b",\n"
        return head + _TAIL % digest_of(head).encode()

    def fault(self) -> str | None:
        """The first inconsistency in the manifest, or None."""
        for path in self.files:
            if reason := layout.unsafe_path(path):
                return f"the file name {path!r}: {reason}"
        for name, tree in self.trees.items():
            if reason := _tree_fault(tree, self.files):
                return f"{name}: {reason}"
        for state_record in self.state.values():
            for file in state_record.files:
                if file not in self.files:
                    return f"{file!r} is not among the files"
        return None

    def overlap_fault(self, *, with_tables: bool = False) -> str | None:
        """Describe the first two slices or values that share bytes of a file; None when there are none.

        *with_tables*: the slices in tables are compared, too. Also describes a gap in a file with a Merkle digest,
        which does not cover bytes in gaps. Raises :class:`CheckpointUnusable` for a damaged table.
        """
        parts: dict[str, list[Slice | Blob]] = {}
        for name, tree in self.trees.items():
            found: list[Slice | Blob] = [*tree.objects.values()]
            for tensor in tree.stored:
                found += _byte_ranges(tensor)
            if with_tables and tree.table is not None:
                # Slices in a segment do not overlap: each begins after the one before.
                for file, start, stop in tree.table.byte_ranges():
                    if stop > self.files[file].size:
                        return f"the slices of {name!r} exceed {file!r}"
                    found.append(Blob(f"slices of {name}", file, start, stop - start, ""))
            for part in found:
                # Empty ones can begin where another slice does.
                if part.nbytes:
                    parts.setdefault(part.file, []).append(part)
        for path, of_file in parts.items():
            of_file.sort(key=lambda part: part.start)
            record = self.files[path]
            end = record.size if record.digest.startswith(OF_SLICES) else None
            if fault := _parts_fault(path, of_file, end):
                return fault
        return None

    @property
    def saved(self) -> frozenset[str]:
        """The names, aliases included, of the attributes with state in the checkpoint."""
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
    def files_with_tensors(self) -> set[str]:
        """The files with tensors or other values of a tree."""
        files = set()
        for tree in self.trees.values():
            files |= files_of(tree)
            files.update(blob.file for blob in tree.objects.values())
        return files

    @property
    def is_imported_run(self) -> bool:
        """Whether the training state of another program was imported (``ckpt import --training-state``)."""
        return "imported_from" in self.lineage and len(self.state) > 1

    @property
    def nbytes(self) -> int:
        """Bytes of all files, without the manifest."""
        return sum(record.size for record in self.files.values())


def has_manifest(directory: Path) -> bool:
    """Return whether *directory* has a manifest, which may be a broken link."""
    return os.path.lexists(directory / layout.MANIFEST)


def _plain_fields(raw: Values) -> ValueDict:
    return {name: convert(raw[name]) for name, convert in _PLAIN_FIELDS.items()}


def _state_record(raw: Values) -> StateRecord:
    names = {name: text(raw[name]) for name in ("kind", "scope", "path")}
    return StateRecord(
        **names, files=tuple(map(text, raw["files"])), aliases=tuple(map(text, raw["aliases"]))
    )


def _tree_fault(tree: Tree, files: Files) -> str | None:
    """Return the first tensor or value of *tree* that its slices or *files* do not make up; None when there is none."""
    for tensor in tree.stored:
        if reason := _tensor_fault(tensor, files):
            return f"the tensor {tensor.fqn!r} of shape {list(tensor.shape)}: {reason}"
    for blob in tree.objects.values():
        if not is_in_file(blob, files):
            return f"the value {blob.fqn!r} is not in {blob.file!r}"
    for alias, stored in tree.tied.items():
        if stored not in tree.tensors:
            return f"{alias!r} is tied to {stored!r}, which is not stored"
    return None if tree.table is None else _table_fault(tree.table, files)


def _tensor_fault(tensor: Tensor, files: Files) -> str | None:
    """Return why the slices of a tensor, or their files, do not make it up; None when they do."""
    if tensor.dtype not in DTYPE_BITS:
        return f"unknown dtype {tensor.dtype!r}"
    if not isinstance(tensor.slices, tuple):
        fault = shape_fault(tensor.shape)  # A formula divides a tensor completely.
    else:
        boxes = [stored.box for stored in tensor.slices]
        fault = tiling_fault(boxes, tensor.shape) or interleaving_fault(tensor.slices)
    if fault is not None:
        return fault
    for stored in tensor.slices if isinstance(tensor.slices, tuple) else ():
        if stored.nbytes != nbytes_of(stored.dtype, stored.sizes):
            return f"the slice at {list(stored.offsets)} has {stored.nbytes} bytes"
    for stored in _byte_ranges(tensor):
        if not is_in_file(stored, files):
            return f"the slice at {list(stored.offsets)} is not in {stored.file!r}"
    return None


# _corners() visits 2**n corners of each box that is partitioned in n dimensions.
MAX_CUT_DIMENSIONS = 5


def tiling_fault(boxes: Sequence[Box], shape: Shape) -> str | None:
    """Return why the boxes do not tile a tensor; None when they do.

    Checks the number of dimensions and the bounds of every box, that no two boxes share an element, and that they
    contain all elements. Any number of empty boxes, or none, tile an empty tensor; exactly one tiles a scalar.
    """
    if fault := shape_fault(shape):
        return fault
    if len(boxes) == 1 and boxes[0] == whole_box(shape) and min(shape, default=0) >= 0:
        return None
    for box in boxes:
        if fault := _bounds_fault(box, shape):
            return fault
    filled = [box for box in boxes if box.numel]
    have = sum(box.numel for box in filled)
    want = math.prod(shape)
    if not filled and not want:
        return None
    if have < want:
        return f"{want - have} of {want} elements are not in any slice"
    # Only the dimensions that a slice partitions: each further one would double the corners.
    cut = []
    for dim, extent in enumerate(shape):
        if any(box.sizes[dim] != extent for box in filled):
            cut.append(dim)
    if len(cut) > MAX_CUT_DIMENSIONS:
        return f"its slices partition {len(cut)} dimensions, more than {MAX_CUT_DIMENSIONS}"
    # The number of elements alone proves nothing: a gap and an overlap can cancel.
    if _corners(filled, cut) == _corners([whole_box(shape)], cut):
        return None
    return "two slices overlap"


def _bounds_fault(box: Box, shape: Shape) -> str | None:
    """Return why a box is not within a tensor's shape; None when it is."""
    if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
        return f"a slice has {len(box.sizes)} dimensions, the tensor {len(shape)}"
    for offset, size, extent in zip(box.offsets, box.sizes, shape, strict=True):
        if offset < 0 or size < 0 or offset + size > extent:
            return f"the slice at {list(box.offsets)} of size {list(box.sizes)} exceeds the shape {list(shape)}"
    return None


def interleaving_fault(slices: Sequence[Slice]) -> str | None:
    """Return why the interleaved *slices* of a tensor are inconsistent; None when they are not."""
    places = {(stored.file, stored.start, stored.interleaved) for stored in slices}
    if len(places) > 1 and any(interleaved for _, _, interleaved in places):
        return "some of its slices are interleaved, in one place, and others are not there"
    return None


def _corners(boxes: Sequence[Box], dims: Sequence[int]) -> dict[Shape, int]:
    """Count how often each corner occurs, with opposite signs for lower and upper ends of dimensions.

    The counts are the mixed difference of the number of boxes at each element. They are therefore equal for two sets of
    boxes if and only if both cover the same elements equally often.
    """
    found: dict[Shape, int] = {}
    for box in boxes:
        ends = []
        for dim in dims:
            low = box.offsets[dim]
            high = low + box.sizes[dim]
            ends.append(((low, 1), (high, -1)))
        for corner in itertools.product(*ends):
            at = tuple(position for position, _ in corner)
            sign = math.prod(sign for _, sign in corner)
            found[at] = found.get(at, 0) + sign
    return {at: count for at, count in found.items() if count}


def _table_fault(table: SliceTable, files: Files) -> str | None:
    """Return why the file of a table cannot have the rows of its tensors; None when it can."""
    file, head_bytes, _ = table.location
    file_bytes = head_bytes + table.num_rows * ROW_BYTES
    if file not in files or files[file].size != file_bytes or head_bytes % SEGMENT_BYTES:
        return f"{file!r} is not the table of its {table.num_rows} slices"
    missing = next((each for each in table.files if each not in files), None)
    return None if missing is None else f"{missing!r} is not among the files"


def _parts_fault(path: str, parts: Sequence[Slice | Blob], end: int | None) -> str | None:
    """Return why sorted *parts* of a file share bytes, or do not fill it up to its *end*, unless that is None."""
    for one, other in itertools.pairwise(parts):
        if one.start + one.nbytes > other.start:
            return f"{one.fqn!r} and {other.fqn!r} share bytes of {path!r}"
    if end is None:
        return None
    for part in parts:
        if isinstance(part, Blob):
            return f"{part.fqn!r} is located in {path!r}, among slices"
    stops = [part.start + part.nbytes for part in parts]
    is_full = stops == [*(part.start for part in parts[1:]), end]
    return None if is_full else f"the slices of {path!r} do not fill it"


def is_in_file(stored: Slice | Blob, files: Files) -> bool:
    """Whether the bytes of a slice or value are within its file."""
    record = files.get(stored.file)
    if record is None or stored.start < 0:
        return False
    return 0 <= stored.nbytes <= record.size - stored.start


def _byte_ranges(tensor: Tensor) -> Sequence[Slice]:
    """Return the byte ranges of a tensor that the manifest itself describes: none for slices in a table."""
    if isinstance(tensor.slices, tuple):
        return contiguous_slices(tensor)
    whole = tensor.slices.whole
    return () if whole is None else (whole,)


def _decode(data: bytes, path: Path | str) -> ValueDict:
    """Parse the bytes of a manifest after its digest is verified; *path* is for error messages.

    Raises :class:`CheckpointUnusable`.
    """
    if len(data) > MAX_BYTES:
        raise unusable(
            "the manifest is too large", path, f"{len(data)} bytes; at most {MAX_BYTES} are read"
        )
    head, tail = data[:-_TAIL_BYTES], data[-_TAIL_BYTES:]
    # Before the digest: a later version may end in another way, which is not damage.
    version = _claimed_version(data)
    if version is not None and version > FORMAT_VERSION:
        raise unusable(
            "the checkpoint has a format that this version does not support",
            path,
            f"version {version}",
        )
    if tail != _TAIL % digest_of(head).encode():
        raise unusable(
            "the manifest is damaged: its digest does not match", path, f"{len(data)} bytes"
        )
    try:
        raw = parse_json(data)
    except ValueError as error:
        raise unusable("the manifest cannot be parsed", path, str(error)[:300]) from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise unusable("the file is not a manifest of this format", path, "not " + FORMAT)
    return raw


def _claimed_version(data: bytes) -> int | None:
    """The format version, which every version writes first and in the same format; None for other content."""
    prefix = b'{"format":"%s","format_version":' % FORMAT.encode()
    if not data.startswith(prefix):
        return None
    digits = data[len(prefix) : len(prefix) + 10].split(b",")[0]
    return int(digits) if digits.isdigit() else None


def _read_bounded(path: Path) -> bytes:
    """Read a regular file of at most MAX_BYTES. Raises :class:`CheckpointUnusable`."""
    try:
        return read_safely(path.parent, path.name, limit=MAX_BYTES)
    except OSError as error:
        # read() can fail, too (EIO): a bare OSError on one rank would leave the others waiting.
        what, value = "the manifest cannot be read", error.strerror
        if isinstance(error, FileNotFoundError):
            what = "there is no manifest: the checkpoint is incomplete"
            if path.parent.is_symlink() and not path.parent.exists():
                what = "the checkpoint is a link to a directory that is not there"
                value = os.readlink(path.parent)
        raise unusable(what, path, value) from error


@contextlib.contextmanager
def _reporting_malformed(path: Path | str) -> Iterator[None]:
    """Raise :class:`CheckpointUnusable` for the errors that parsing malformed content raises."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise unusable("the manifest is malformed", path, repr(error)) from error


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
