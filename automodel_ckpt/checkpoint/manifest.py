"""MANIFEST.json: what a checkpoint is made of, written last, so that what carries one is complete.

It names every file (size, digest), every tensor (dtype, shape, the slices that make it up and where their raw bytes
stand), every pickled value, the recipe attributes they belong to, the environment, and its own digest. The format is
described in docs/format.md. Nothing here imports torch or trusts what it reads: a manifest that does not describe a
checkpoint of this format exactly is refused with :class:`CheckpointUnusable`.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.slices import DTYPE_BITS, Slice, Tensor, nbytes_of, tiling_fault
from automodel_ckpt.errors import CheckpointUnusable

FORMAT = "automodel_ckpt"
FORMAT_VERSION = 1
MAX_BYTES = 1 << 29
_TAIL = b'"digest": "%s"\n}\n'
_TAIL_BYTES = len(_TAIL % (b"xxh3_128:" + b"0" * 32))


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file's size in bytes and the digest of its content."""

    size: int
    digest: str


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

    *tied* maps each tensor name that was not stored to the stored one it shares its memory with.
    """

    format: str
    tensors: Mapping[str, Tensor]
    objects: Mapping[str, Blob]
    tied: Mapping[str, str] = field(default_factory=dict)


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
    """What choosing and listing checkpoints asks of a manifest; its tensors and files are not looked at."""

    step: int
    epoch: int
    created: float
    nbytes: int
    losses: Mapping[str, Any]
    lineage: Mapping[str, Any]
    has_optimizer: bool

    @classmethod
    def read(cls, checkpoint: Path) -> Summary:
        """As :meth:`Manifest.read`, a few times faster; the digest is compared all the same."""
        path = checkpoint / layout.MANIFEST
        with _refusing_other_forms(path):
            raw = _checked_json(_read_regular(path), path)
            return cls(
                step=_integer(raw["step"]),
                epoch=_integer(raw["epoch"]),
                created=float(raw["created"]),
                nbytes=sum(record["size"] for record in raw["files"].values()),
                losses=_mapping(raw["losses"]),
                lineage=_mapping(raw["lineage"]),
                has_optimizer=any(
                    r["kind"] == "optimizer" and r["scope"] != "not saved" for r in raw["state"].values()
                ),
            )


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that is known of a checkpoint without reading its tensors."""

    step: int
    epoch: int
    created: float
    world_size: int
    dp_size: int
    progress: Mapping[str, Any]
    losses: Mapping[str, Any]
    environment: Mapping[str, Any]
    lineage: Mapping[str, Any]
    state: Mapping[str, StateRecord]
    trees: Mapping[str, Tree]
    files: Mapping[str, FileRecord]
    digest: str = ""
    format_version: int = FORMAT_VERSION

    @classmethod
    def read(cls, checkpoint: Path) -> Manifest:
        """The manifest of a checkpoint directory. Raises :class:`CheckpointUnusable` for whatever is wrong with it."""
        path = checkpoint / layout.MANIFEST
        return cls.parse(_read_regular(path), path)

    @classmethod
    def parse(cls, data: bytes, path: Path) -> Manifest:
        """The manifest in *data*; *path* is for the messages."""
        with _refusing_other_forms(path):
            manifest = _from_json(_checked_json(data, path))
        if fault := manifest.fault():
            raise _unusable("the manifest contradicts itself", path, fault)
        return manifest

    def to_bytes(self) -> bytes:
        """The file's content; the last line carries the digest of everything before it."""
        body = json.dumps(_to_json(self), ensure_ascii=True, separators=(",", ":"), allow_nan=True)
        head = body[:-1].encode() + b",\n"
        return head + _TAIL % digest_of(head).encode()

    def fault(self) -> str | None:
        """The first thing in the manifest that cannot be true, or None."""
        for path, record in self.files.items():
            if reason := layout.unsafe_path(path):
                return f"the file name {path!r}: {reason}"
            if record.size < 0:
                return f"the size of {path!r} is {record.size}"
        for name, tree in self.trees.items():
            if reason := self._tree_fault(name, tree):
                return reason
        return next((f"{f!r} is not among the files" for s in self.state.values() for f in s.files
                     if f not in self.files), None)  # fmt: skip

    def _tree_fault(self, name: str, tree: Tree) -> str | None:
        for tensor in tree.tensors.values():
            if tensor.dtype not in DTYPE_BITS:
                return f"{name}: the tensor {tensor.fqn!r} has the unknown dtype {tensor.dtype!r}"
            if reason := tiling_fault([piece.box for piece in tensor.slices], tensor.shape):
                return f"{name}: the tensor {tensor.fqn!r} of shape {list(tensor.shape)}: {reason}"
            for piece in tensor.slices:
                if piece.nbytes != nbytes_of(piece.dtype, piece.sizes) or not self._holds(piece):
                    return f"{name}: the slice at {list(piece.offsets)} of {tensor.fqn!r} is not in {piece.file!r}"
        for blob in tree.objects.values():
            if not self._holds(blob):
                return f"{name}: the value {blob.fqn!r} is not in {blob.file!r}"
        return next((f"{name}: {alias!r} is tied to {kept!r}, which is not stored"
                     for alias, kept in tree.tied.items() if kept not in tree.tensors), None)  # fmt: skip

    def _holds(self, piece: Slice | Blob) -> bool:
        record = self.files.get(piece.file)
        return record is not None and piece.start >= 0 and 0 <= piece.nbytes <= record.size - piece.start

    @property
    def nbytes(self) -> int:
        """Bytes of all files, the manifest itself not counted."""
        return sum(record.size for record in self.files.values())


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


@dataclass(slots=True)
class Part:
    """What one rank wrote of a checkpoint, by which the leader makes the manifest."""

    rank: int
    files: dict[str, FileRecord] = field(default_factory=dict)
    trees: dict[str, TreePart] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, data: bytes) -> Part:
        raw = json.loads(data)
        return cls(
            rank=raw["rank"],
            files={path: FileRecord(**record) for path, record in raw["files"].items()},
            trees={name: _tree_part(tree) for name, tree in raw["trees"].items()},
        )


def merge_files(parts: Iterable[Part]) -> dict[str, FileRecord]:
    """All files of all ranks, by name."""
    return dict(sorted(item for part in parts for item in part.files.items()))


def merge_tree(name: str, format: str, parts: Iterable[Part], tied: Mapping[str, str]) -> Tree:
    """The tree *name* from what each rank wrote of it."""
    tensors: dict[str, Tensor] = {}
    objects: dict[str, Blob] = {}
    for part in (part.trees[name] for part in parts if name in part.trees):
        objects.update({blob.fqn: blob for blob in part.objects})
        for tensor in part.tensors:
            known = tensors.get(tensor.fqn)
            pieces = (known.slices if known else ()) + tensor.slices
            tensors[tensor.fqn] = Tensor(tensor.fqn, tensor.dtype, tensor.shape, pieces)
    return Tree(format, tensors, objects, dict(tied))


def digest_of(data: bytes | memoryview) -> str:
    """The digest, with the name of its algorithm, of bytes in memory."""
    return "xxh3_128:" + xxhash.xxh3_128_hexdigest(data)


@contextlib.contextmanager
def _refusing_other_forms(path: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _unusable("the manifest is not of the known form", path, repr(error)) from error


def _unusable(what: str, path: Path, value: object) -> CheckpointUnusable:
    return CheckpointUnusable(what, where=str(path), value=value, remedy="use another checkpoint of this run")


def _read_regular(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise _unusable("there is no manifest: the checkpoint is incomplete", path, "no such file") from error
    except OSError as error:
        raise _unusable("the manifest cannot be read", path, error.strerror) from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            raise _unusable("the manifest is no regular file of a sane size", path, f"{status.st_size} bytes")
        return file.read()


def _checked_json(data: bytes, path: Path) -> dict[str, Any]:
    head, tail = data[:-_TAIL_BYTES], data[-_TAIL_BYTES:]
    version = _claimed_version(data)
    if version is not None and version > FORMAT_VERSION:
        raise _unusable("the checkpoint is of a later format than this program reads", path, f"version {version}")
    if tail != _TAIL % digest_of(head).encode():
        raise _unusable("the manifest is damaged: its digest does not fit", path, f"{len(data)} bytes")
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _unusable("the manifest is no JSON", path, repr(error)) from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise _unusable("the manifest is of another kind", path, "not " + FORMAT)
    return raw


def _claimed_version(data: bytes) -> int | None:
    """The version at the head of the file, which every version writes first and alike."""
    prefix = b'{"format":"%s","format_version":' % FORMAT.encode()
    if not data.startswith(prefix):
        return None
    digits = data[len(prefix) : len(prefix) + 10].split(b",")[0]
    return int(digits) if digits.isdigit() else None


def _to_json(manifest: Manifest) -> dict[str, Any]:
    raw = {"format": FORMAT, "format_version": manifest.format_version}
    for name in ("step", "epoch", "created", "world_size", "dp_size", "progress", "losses", "environment", "lineage"):
        raw[name] = getattr(manifest, name)
    raw["state"] = {name: asdict(record) for name, record in manifest.state.items()}
    raw["trees"] = {name: _tree_to_json(tree) for name, tree in manifest.trees.items()}
    raw["files"] = {path: asdict(record) for path, record in manifest.files.items()}
    return raw


def _tree_to_json(tree: Tree) -> dict[str, Any]:
    return {
        "format": tree.format,
        "tied": dict(tree.tied),
        "tensors": {fqn: _tensor_to_json(tensor) for fqn, tensor in tree.tensors.items()},
        "objects": {
            fqn: {"file": b.file, "start": b.start, "nbytes": b.nbytes, "digest": b.digest}
            for fqn, b in tree.objects.items()
        },
    }


def _tensor_to_json(tensor: Tensor) -> dict[str, Any]:
    names = ("file", "start", "nbytes", "offsets", "sizes", "digest")
    slices = [{name: getattr(piece, name) for name in names} for piece in tensor.slices]
    return {"dtype": tensor.dtype, "shape": tensor.shape, "slices": slices}


def _from_json(raw: Mapping[str, Any]) -> Manifest:
    return Manifest(
        step=_integer(raw["step"]),
        epoch=_integer(raw["epoch"]),
        created=float(raw["created"]),
        world_size=_integer(raw["world_size"]),
        dp_size=_integer(raw["dp_size"]),
        progress=_mapping(raw["progress"]),
        losses=_mapping(raw["losses"]),
        environment=_mapping(raw["environment"]),
        lineage=_mapping(raw["lineage"]),
        state={name: _state_record(record) for name, record in raw["state"].items()},
        trees={name: _tree(tree) for name, tree in raw["trees"].items()},
        files={path: _file_record(record) for path, record in raw["files"].items()},
        digest=_text(raw["digest"]),
        format_version=_integer(raw["format_version"]),
    )


def _state_record(raw: Mapping[str, Any]) -> StateRecord:
    names = {name: _text(raw[name]) for name in ("kind", "scope", "path")}
    return StateRecord(**names, files=tuple(map(_text, raw["files"])), aliases=tuple(map(_text, raw["aliases"])))


def _file_record(raw: Mapping[str, Any]) -> FileRecord:
    return FileRecord(_integer(raw["size"]), _text(raw["digest"]))


def _tree(raw: Mapping[str, Any]) -> Tree:
    return Tree(
        format=_text(raw["format"]),
        tensors={fqn: _tensor(fqn, tensor) for fqn, tensor in raw["tensors"].items()},
        objects={fqn: _blob({**blob, "fqn": fqn}) for fqn, blob in raw["objects"].items()},
        tied={_text(alias): _text(kept) for alias, kept in raw["tied"].items()},
    )


def _tree_part(raw: Mapping[str, Any]) -> TreePart:
    return TreePart(
        tensors=[_tensor(tensor["fqn"], tensor) for tensor in raw["tensors"]],
        objects=[_blob(blob) for blob in raw["objects"]],
        dcp_items=[
            DcpItem(
                i["fqn"], None if i["offsets"] is None else _sizes(i["offsets"]), i["file"], i["start"], i["nbytes"]
            )
            for i in raw["dcp_items"]
        ],
    )


def _tensor(fqn: str, raw: Mapping[str, Any]) -> Tensor:
    dtype = _text(raw["dtype"])
    pieces = tuple(
        Slice(
            fqn, dtype, _sizes(piece["offsets"]), _sizes(piece["sizes"]), _text(piece["file"]),
            _integer(piece["start"]), _integer(piece["nbytes"]), _text(piece["digest"]),
        )
        for piece in raw["slices"]
    )  # fmt: skip
    return Tensor(fqn, dtype, _sizes(raw["shape"]), pieces)


def _blob(raw: Mapping[str, Any]) -> Blob:
    return Blob(raw["fqn"], _text(raw["file"]), _integer(raw["start"]), _integer(raw["nbytes"]), _text(raw["digest"]))


def _integer(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _sizes(value: Iterable[object]) -> tuple[int, ...]:
    return tuple(_integer(item) for item in value)


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no mapping")
    return value
