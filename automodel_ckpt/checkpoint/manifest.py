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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.digests import FileRecord, digest_of
from automodel_ckpt.checkpoint.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.bounded_json import parse_json
from automodel_ckpt.checkpoint.files.safe_open import open_regular
from automodel_ckpt.checkpoint.slices import (
    Slice,
    Tensor,
    contiguous_slices,
    interleaving_fault,
    nbytes_of,
    tiling_fault,
)
from automodel_ckpt.errors import CheckpointUnusable

FORMAT = "automodel_ckpt"
FORMAT_VERSION = 1
# The bytes of the tensors are no measure for this limit: the manifest of many tiny tensors is larger than their data.
MAX_BYTES = 1 << 29
MAX_INTEGER = 2**63 - 1
# The scope of an attribute whose state is not in the checkpoint.
NOT_SAVED = "not saved"
MAX_DIMENSIONS = 64
MAX_PLAIN_DEPTH = 8
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
class Blob:
    """A value written with ``torch.save``, at bytes ``start .. start + nbytes`` of a file."""

    fqn: str
    file: str
    start: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Tree:
    """The state of a module or an optimizer: a directory of tensors and a few other values.

    *tied* maps each tensor name that was not stored to the stored one that shares its memory. *copies* are tensors
    stored a second time under such a name for other readers; loading ignores them.
    """

    format: str
    tensors: Mapping[str, Tensor]
    objects: Mapping[str, Blob]
    tied: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def stored(self) -> Iterator[Tensor]:
        """All tensors that are stored in files, copies included."""
        yield from self.tensors.values()
        yield from self.copies.values()


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
            sizes = [_integer(record["size"]) for record in raw["files"].values()]
            return cls(
                step=_integer(raw["step"]),
                epoch=_integer(raw["epoch"]),
                created=_seconds(raw["created"]),
                nbytes=sum(sizes),
                losses=_mapping(raw["losses"]),
                validated=_flag(raw["validated"]),
                environment=_mapping(raw["environment"]),
                lineage=_mapping(raw["lineage"]),
                has_optimizer=any(_is_saved_optimizer(record) for record in raw["state"].values()),
                digest=_text(raw["digest"]),
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
    format_version: int = FORMAT_VERSION

    @classmethod
    def read(cls, checkpoint: Path) -> Manifest:
        """Read the manifest of a checkpoint. Raises :class:`CheckpointUnusable` if it is missing or invalid."""
        path = checkpoint / layout.MANIFEST
        return cls.parse(_read_bounded(path), path)

    @classmethod
    def parse(cls, data: bytes, path: Path | str) -> Manifest:
        """Parse a manifest; *path* is for error messages. Raises :class:`CheckpointUnusable`."""
        with _reporting_malformed(path):
            manifest = _from_json(_checked_json(data, path))
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
        if reason := self._overlap_fault() or self._gap_fault():
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
            boxes = [piece.box for piece in tensor.slices]
            if reason := tiling_fault(boxes, tensor.shape) or interleaving_fault(tensor):
                return f"{name}: the tensor {tensor.fqn!r} of shape {list(tensor.shape)}: {reason}"
            if piece := self._misplaced(tensor):
                return f"{name}: the slice at {list(piece.offsets)} of {tensor.fqn!r} is not in {piece.file!r}"
        for blob in tree.objects.values():
            if not self._is_in_file(blob):
                return f"{name}: the value {blob.fqn!r} is not in {blob.file!r}"
        for alias, stored in tree.tied.items():
            if stored not in tree.tensors:
                return f"{name}: {alias!r} is tied to {stored!r}, which is not stored"
        return None

    def _misplaced(self, tensor: Tensor) -> Slice | None:
        """Return the first slice with a wrong size or outside of its file; None if there is none."""
        for piece in tensor.slices:
            if piece.nbytes != nbytes_of(piece.dtype, piece.sizes):
                return piece
        for piece in contiguous_slices(tensor):
            if not self._is_in_file(piece):
                return piece
        return None

    def _overlap_fault(self) -> str | None:
        """Describe the first two slices or values that share bytes of a file; None if there are none."""
        parts: list[Slice | Blob] = []
        for tree in self.trees.values():
            parts += [blob for blob in tree.objects.values() if blob.nbytes]
            for tensor in tree.stored:
                parts += [piece for piece in contiguous_slices(tensor) if piece.nbytes]
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
                for piece in contiguous_slices(tensor):
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
    raw = {"format": FORMAT, "format_version": manifest.format_version}
    raw |= {name: getattr(manifest, name) for name in _PLAIN_FIELDS}
    raw["state"] = {name: asdict(record) for name, record in manifest.state.items()}
    raw["trees"] = {name: _tree_to_json(tree) for name, tree in manifest.trees.items()}
    raw["files"] = {path: asdict(record) for path, record in manifest.files.items()}
    return raw


def _tree_to_json(tree: Tree) -> dict[str, Any]:
    raw = {
        "format": tree.format,
        "tied": dict(tree.tied),
        "tensors": {fqn: _tensor_to_json(tensor) for fqn, tensor in tree.tensors.items()},
        "objects": {
            fqn: {"file": b.file, "start": b.start, "nbytes": b.nbytes, "digest": b.digest}
            for fqn, b in tree.objects.items()
        },
    }
    if tree.copies:
        raw["copies"] = {fqn: _tensor_to_json(tensor) for fqn, tensor in tree.copies.items()}
    return raw


def _tensor_to_json(tensor: Tensor) -> dict[str, Any]:
    names = ("file", "start", "nbytes", "offsets", "sizes", "digest")
    slices = []
    for piece in tensor.slices:
        raw = {name: getattr(piece, name) for name in names}
        if piece.interleaved:
            raw["interleaved"] = True
        slices.append(raw)
    return {"dtype": tensor.dtype, "shape": tensor.shape, "slices": slices}


def _from_json(raw: Mapping[str, Any]) -> Manifest:
    return Manifest(
        step=_integer(raw["step"]),
        epoch=_integer(raw["epoch"]),
        created=_seconds(raw["created"]),
        world_size=_integer(raw["world_size"]),
        dp_size=_integer(raw["dp_size"]),
        progress=_mapping(raw["progress"]),
        losses=_mapping(raw["losses"]),
        validated=_flag(raw["validated"]),
        environment=_mapping(raw["environment"]),
        lineage=_mapping(raw["lineage"]),
        state={_text(name): _state_record(record) for name, record in raw["state"].items()},
        trees={_text(name): _tree(tree) for name, tree in raw["trees"].items()},
        files={path: _file_record(record) for path, record in raw["files"].items()},
        digest=_text(raw["digest"]),
        format_version=_integer(raw["format_version"]),
    )


def _state_record(raw: Mapping[str, Any]) -> StateRecord:
    names = {name: _text(raw[name]) for name in ("kind", "scope", "path")}
    return StateRecord(
        **names, files=tuple(map(_text, raw["files"])), aliases=tuple(map(_text, raw["aliases"]))
    )


def _file_record(raw: Mapping[str, Any]) -> FileRecord:
    return FileRecord(_integer(raw["size"]), _text(raw["digest"]))


def _tree(raw: Mapping[str, Any]) -> Tree:
    return Tree(
        format=_text(raw["format"]),
        tensors={fqn: tensor_of(fqn, tensor) for fqn, tensor in raw["tensors"].items()},
        objects={fqn: blob_of({**blob, "fqn": fqn}) for fqn, blob in raw["objects"].items()},
        tied={_text(alias): _text(kept) for alias, kept in raw["tied"].items()},
        copies={fqn: tensor_of(fqn, tensor) for fqn, tensor in raw.get("copies", {}).items()},
    )


def tensor_of(fqn: str, raw: Mapping[str, Any]) -> Tensor:
    """Convert a tensor from JSON. Raises KeyError, TypeError or ValueError if it is malformed."""
    dtype = _text(raw["dtype"])
    pieces = tuple(
        Slice(
            fqn,
            dtype,
            sizes_of(piece["offsets"]),
            sizes_of(piece["sizes"]),
            _text(piece["file"]),
            _integer(piece["start"]),
            _integer(piece["nbytes"]),
            _text(piece["digest"]),
            _flag(piece.get("interleaved", False)),
        )
        for piece in raw["slices"]
    )
    return Tensor(_text(fqn), dtype, sizes_of(raw["shape"]), pieces)


def blob_of(raw: Mapping[str, Any]) -> Blob:
    """Convert a pickled value's position from JSON. Raises KeyError, TypeError or ValueError if it is malformed."""
    fqn, file, digest = (_text(raw[key]) for key in ("fqn", "file", "digest"))
    return Blob(fqn, file, _integer(raw["start"]), _integer(raw["nbytes"]), digest)


def _integer(value: object) -> int:
    # Not isinstance: True is an int, too.
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        raise ValueError(f"{_shown(value)} is not a count")
    return value


def _seconds(value: object) -> float:
    if type(value) not in (int, float) or not 0 <= value < MAX_INTEGER:  # type: ignore[operator]
        raise ValueError(f"{_shown(value)} is not a time")
    return float(value)  # type: ignore[arg-type]


def _shown(value: object) -> str:
    """Format a value for a message. It may have thousands of digits or levels."""
    if isinstance(value, (str, float, bool, type(None))):
        return repr(value)[:100]
    return f"a value of type {type(value).__name__}"


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{_shown(value)} is not text")
    try:
        # JSON can contain lone surrogates, which only fail later, when they are printed or written.
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{_shown(value)} is not valid Unicode") from None
    return value


def sizes_of(value: Iterable[object]) -> tuple[int, ...]:
    """Convert a shape or offsets from JSON. Raises TypeError or ValueError if they are malformed."""
    sizes = tuple(_integer(item) for item in value)
    if len(sizes) > MAX_DIMENSIONS:
        raise ValueError(f"{len(sizes)} dimensions")
    return sizes


def _mapping(value: object) -> dict[str, Any]:
    """Check the depth of a mapping for display, and its integers, which later code stores in 64 bits."""
    if not isinstance(value, dict):
        raise TypeError(f"{_shown(value)} is not a mapping")
    level: list[Any] = [value]
    for _ in range(MAX_PLAIN_DEPTH):
        items: list[Any] = []
        for outer in level:
            items += outer.values() if isinstance(outer, dict) else outer
        if any(isinstance(item, int) and abs(item) > MAX_INTEGER for item in items):
            raise ValueError("a number of more than 64 bits")
        level = [item for item in items if isinstance(item, (dict, list))]
    if level:
        raise ValueError(f"values nested more than {MAX_PLAIN_DEPTH} levels deep")
    return value
