"""The trees of a checkpoint, their JSON in the manifest, and their slices in each file. Imports no torch.

A small tree lists its slices in the manifest. A large one has formulas there, and a table in a file next to its tensors
(``slice_table.py``). Both have the same tensors for a reader.

The digest of a file in which several ranks wrote slices is computed from theirs. It is the XXH3-128 of a text: a line
with the digest of the bytes before the first slice, then a line ``START OFFSETS NBYTES DIGEST`` for each slice that is
not empty, in the order of start and offsets (decimal; offsets joined by commas; DIGEST with the name of its algorithm).
The manifest has the slices' digests.
"""

from __future__ import annotations

import contextlib
import mmap
import operator
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from automodel_ckpt.checkpoint.files.durable_file import (
    OF_SLICES,
    FileRecord,
    digest_from,
    digest_range,
)
from automodel_ckpt.checkpoint.files.safe_open import (
    flag,
    integer,
    is_sparse,
    link_on_the_way,
    open_safely,
    shown,
    sizes_of,
    text,
)
from automodel_ckpt.checkpoint.files.type_aliases import Shape, Texts, ValueDict, Values
from automodel_ckpt.checkpoint.parts.slices import (
    Position,
    RegularSlices,
    Sharding,
    Slice,
    Tensor,
    TensorDict,
    TensorMap,
    runs_in_file,
)
from automodel_ckpt.errors import TAKE_ANOTHER, Problem

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.parts.slice_table import Read, SliceTable

_NAMED = 5


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
    stored a second time under such a name for other readers; loading ignores them. *table* has the regular slices of
    *tensors* and *copies* (``slice_table.py``), if there are any.
    """

    format: str
    tensors: TensorMap
    objects: Mapping[str, Blob]
    tied: Texts = field(default_factory=dict)
    copies: TensorMap = field(default_factory=dict)
    table: SliceTable | None = field(default=None, compare=False)

    @property
    def stored(self) -> Iterator[Tensor]:
        """All tensors that are stored in files, copies included."""
        yield from self.tensors.values()
        yield from self.copies.values()


def files_of(tree: Tree) -> set[str]:
    """Return the files that the tensors of a tree are stored in."""
    files = set(tree.table.files) if tree.table is not None else set()
    for tensor in tree.stored:
        if not isinstance(tensor.slices, RegularSlices):
            files.update(stored.file for stored in tensor.slices)
        elif tensor.slices.position is not None:
            files.add(tensor.slices.position.file)
    return files


def uses_table(tree: Tree) -> bool:
    """Whether a manifest refers to the table of the tree; otherwise it lists all slices."""
    table = tree.table
    if table is None or not table.location.file:
        return False
    # A tree of which some tensors were selected has other rows than its table.
    regular = [tensor.slices for tensor in tree.stored if isinstance(tensor.slices, RegularSlices)]
    return len(regular) == len(table.tensors) and all(map(operator.is_, regular, table.tensors))


def tree_to_json(tree: Tree) -> ValueDict:
    """Convert a tree to JSON."""
    # The shardings of a tree with a table, with their numbers.
    shardings: dict[Sharding, int] | None = {} if uses_table(tree) else None
    tensors = {fqn: _tensor_to_json(each, shardings) for fqn, each in tree.tensors.items()}
    copies = {fqn: _tensor_to_json(each, shardings) for fqn, each in tree.copies.items()}
    raw: ValueDict = {"format": tree.format, "tied": dict(tree.tied)}
    if shardings is not None and tree.table is not None:
        file, head_bytes, digest = tree.table.location
        place = {"file": file, "head_bytes": head_bytes, "digest": digest}
        raw["table"] = place | {"files": tree.table.files}
        raw["shardings"] = [
            {
                "mesh": sharding.mesh,
                "strides": sharding.strides,
                "split": {str(dim): mesh_dims for dim, mesh_dims in sharding.split},
            }
            for sharding in shardings
        ]
    raw["tensors"] = tensors
    raw["objects"] = {fqn: _fields(b, _BLOB_FIELDS) for fqn, b in tree.objects.items()}
    if copies:
        raw["copies"] = copies
    return raw


_BLOB_FIELDS = ("file", "start", "nbytes", "digest")
_SLICE_FIELDS = ("file", "start", "nbytes", "offsets", "sizes", "digest")


def _fields(value: Slice | Blob, names: tuple[str, ...]) -> ValueDict:
    return {name: getattr(value, name) for name in names}


def _tensor_to_json(tensor: Tensor, shardings: dict[Sharding, int] | None) -> ValueDict:
    """Convert a tensor to JSON. *shardings* is extended. It is None without a table."""
    described: ValueDict = {"dtype": tensor.dtype, "shape": tensor.shape}
    if shardings is None or not isinstance(tensor.slices, RegularSlices):
        described["slices"] = slices = []
        for stored in tensor.slices:
            interleaved = {"interleaved": True} if stored.interleaved else {}
            slices.append(_fields(stored, _SLICE_FIELDS) | interleaved)
        return described
    regular = tensor.slices
    described["sharding"] = shardings.setdefault(regular.sharding, len(shardings))
    described["rank"] = regular.first
    if regular.part:
        described["part"] = regular.part
    if regular.position is not None:
        described |= {"file": regular.position.file, "start": regular.position.start}
        if regular.position.interleaved:
            described["interleaved"] = True
    return described


def tree_of(raw: Values, read: Read, checkpoint: str) -> Tree:
    """Convert a tree from JSON. *read* reads its table, and *checkpoint* is for messages.

    Raises KeyError, TypeError or ValueError if it is malformed.
    """
    table: SliceTable | None = None
    shardings = []
    if "table" in raw:
        # Not at the top: numpy takes longer to import than most commands take.
        from automodel_ckpt.checkpoint.parts.slice_table import Location, SliceTable

        place = raw["table"]
        location = Location(
            text(place["file"]), integer(place["head_bytes"]), text(place["digest"])
        )
        table = SliceTable(location, list(map(text, place["files"])), read, checkpoint)
        shardings = [_sharding_of(sharding) for sharding in raw["shardings"]]

    def tensors_of(raw_tensors: Values) -> TensorDict:
        found = {}
        for fqn, tensor in raw_tensors.items():
            if table is not None and "sharding" in tensor:
                found[fqn] = _regular_of(text(fqn), tensor, shardings, table)
            else:
                found[fqn] = tensor_of(fqn, tensor)
        return found

    return Tree(
        format=text(raw["format"]),
        tensors=tensors_of(raw["tensors"]),
        objects={fqn: blob_of({**blob, "fqn": fqn}) for fqn, blob in raw["objects"].items()},
        tied={text(alias): text(kept) for alias, kept in raw["tied"].items()},
        copies=tensors_of(raw.get("copies", {})),
        table=table,
    )


def _sharding_of(raw: Values) -> Sharding:
    split = []
    for dim, mesh_dims in raw["split"].items():
        if not dim.isdecimal() or len(dim) > 2:
            raise ValueError(f"{shown(dim)} is not a dimension")
        split.append((int(dim), sizes_of(mesh_dims)))
    sharding = Sharding(sizes_of(raw["mesh"]), sizes_of(raw["strides"]), tuple(split))
    if fault := sharding.fault():
        raise ValueError(f"a sharding: {fault}")
    return sharding


def _regular_of(fqn: str, raw: Values, shardings: list[Sharding], table: SliceTable) -> Tensor:
    number = integer(raw["sharding"])
    if number >= len(shardings):
        raise ValueError(f"{shown(fqn)} has an unknown sharding")
    sharding = shardings[number]
    dtype, shape = text(raw["dtype"]), sizes_of(raw["shape"])
    if any(dim >= len(shape) for dim, _ in sharding.split):
        raise ValueError(f"{shown(fqn)} has fewer dimensions than its sharding")
    position = None
    if "file" in raw:
        interleaved = flag(raw.get("interleaved", False))
        position = Position(text(raw["file"]), integer(raw["start"]), interleaved)
    first, part = integer(raw["rank"]), integer(raw.get("part", 0))
    return table.add(RegularSlices(fqn, dtype, shape, sharding, first, part, position))


def tensor_of(fqn: str, raw: Values) -> Tensor:
    """Convert a tensor from JSON. Raises KeyError, TypeError or ValueError if it is malformed."""
    dtype = text(raw["dtype"])
    slices = tuple(
        Slice(
            fqn,
            dtype,
            sizes_of(entry["offsets"]),
            sizes_of(entry["sizes"]),
            text(entry["file"]),
            integer(entry["start"]),
            integer(entry["nbytes"]),
            text(entry["digest"]),
            flag(entry.get("interleaved", False)),
        )
        for entry in raw["slices"]
    )
    return Tensor(text(fqn), dtype, sizes_of(raw["shape"]), slices)


def blob_of(raw: Values) -> Blob:
    """Convert a pickled value's position from JSON. Raises KeyError, TypeError or ValueError if it is malformed."""
    fqn, file, digest = (text(raw[key]) for key in ("fqn", "file", "digest"))
    return Blob(fqn, file, integer(raw["start"]), integer(raw["nbytes"]), digest)


# ---------------------------------------------------------------- files


@dataclass(frozen=True, slots=True)
class FileSlice:
    """A slice in a file, and the shape of its tensor. A value that is no tensor (*is_value*) is a slice of bytes."""

    stored: Slice
    shape: Shape
    is_value: bool = False

    def __str__(self) -> str:
        if self.is_value:
            return f"value {self.stored.fqn}"
        return f"tensor {self.stored.fqn} (slice at {list(self.stored.offsets)})"


class FileContents:
    """The slices and values of *trees* that are not empty, by file.

    Of a slice table, only the rows of the ranks that wrote a file are read, when that file is asked for.
    """

    def __init__(self, trees: Iterable[Tree]) -> None:
        self._trees = tuple(trees)
        self._listed: dict[str, list[FileSlice]] = {}
        for tree in self._trees:
            for tensor in tree.stored:
                slices = tensor.slices
                # A table has the slices in files of the ranks.
                if not isinstance(slices, RegularSlices) or slices.position is not None:
                    for stored in slices:
                        self._add(FileSlice(stored, tensor.shape))
            for blob in tree.objects.values():
                size = (blob.nbytes,)
                value = Slice(
                    blob.fqn, "U8", (0,), size, blob.file, blob.start, blob.nbytes, blob.digest
                )
                self._add(FileSlice(value, size, is_value=True))

    def _add(self, one: FileSlice) -> None:
        if one.stored.nbytes:
            self._listed.setdefault(one.stored.file, []).append(one)

    def listed(self, file: str) -> list[FileSlice]:
        """Return those in a file that no table describes, in the order of its Merkle digest."""
        return sorted(self._listed.get(file, ()), key=_place)

    def slices(self, file: str) -> list[FileSlice]:
        """Return those in a file in their order. Raises :class:`CheckpointUnusable` for a damaged table."""
        found = list(self._listed.get(file, ()))
        for tree in self._trees:
            ranks = [] if tree.table is None else tree.table.ranks_in(file)
            for tensor in tree.stored if ranks else ():
                slices = tensor.slices
                if not isinstance(slices, RegularSlices) or slices.position is not None:
                    continue
                for stored in filter(None, map(slices.of_rank, ranks)):
                    if stored.file == file and stored.nbytes:
                        found.append(FileSlice(stored, tensor.shape))
        return sorted(found, key=_place)


def _place(one: FileSlice) -> tuple[int, Shape]:
    # Interleaved slices of a tensor have the same start; their offsets order them.
    return one.stored.start, one.stored.offsets


def has_merkle_digest(record: FileRecord) -> bool:
    """Whether the digest of a file is a Merkle digest."""
    return record.digest.startswith(OF_SLICES)


def merkle_digest(head: str, slices: Iterable[FileSlice]) -> str:
    """Compute the digest of a file with these *slices*. *head* is the digest of the bytes before the first one."""
    text = f"{head}\n"
    for one in slices:
        stored = one.stored
        offsets = ",".join(map(str, stored.offsets))
        # The text is part of the format: every reader must get the same bytes (docs/format.md).
        text += f"{stored.start} {offsets} {stored.nbytes} {stored.digest}\n"
    return OF_SLICES + xxhash.xxh3_128_hexdigest(text.encode())


def head_fits(root: Path, path: str, record: FileRecord, slices: Sequence[FileSlice]) -> bool:
    """Whether the bytes before the first slice, and the digests in the manifest, give the file's digest.

    Raises OSError.
    """
    num_bytes = slices[0].stored.start if slices else record.size
    with _opened(root, path) as descriptor:
        _, head = digest_range(descriptor, 0, num_bytes)
    return merkle_digest(head, slices) == record.digest


def damaged(root: Path, path: str, slices: Iterable[FileSlice]) -> list[FileSlice]:
    """Return the slices of a file with bytes that do not match their digests. Raises OSError."""
    with _opened(root, path) as descriptor:
        return [one for one in slices if _digest(descriptor, one) != one.stored.digest]


def damage_text(slices: Sequence[FileSlice]) -> str:
    """Name the damaged slices of a file with a different digest."""
    if not slices:
        return "the damage is in no tensor"
    names = ", ".join(map(str, slices[:_NAMED]))
    more = f", {len(slices) - _NAMED} more" if len(slices) > _NAMED else ""
    return f"damaged: {names}{more}"


@contextlib.contextmanager
def _opened(root: Path, path: str) -> Iterator[int]:
    descriptor = open_safely(root, path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _digest(descriptor: int, one: FileSlice) -> str:
    """The digest of the bytes of a slice, row-major."""
    stored = one.stored
    if not stored.interleaved:
        return digest_range(descriptor, stored.start, stored.nbytes)[1]
    hashed = xxhash.xxh3_128()
    # Mapped, because an interleaved slice has many short runs: a system call for each would cost more than reading.
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
        for run in runs_in_file(stored, one.shape):
            # A mapping with a view of it cannot be closed (BufferError).
            with view[run.source : run.source + run.nbytes] as block:
                hashed.update(block)
    return digest_from(hashed)


def size_problem(checkpoint: Path, path: str, record: FileRecord) -> Problem | None:
    """Return the problem of a file that can be found without reading it; None when there is none."""
    where = checkpoint / path
    if link := link_on_the_way(checkpoint, path):
        return Problem(
            "a checkpoint contains a symbolic link", str(checkpoint / link), path, TAKE_ANOTHER
        )
    what = value = ""
    try:
        status = os.lstat(where)
        if not stat.S_ISREG(status.st_mode):
            what, value = "is not a regular file", stat.filemode(status.st_mode)
        elif status.st_size != record.size:
            what = "has another size"
            value = f"{status.st_size} bytes, {record.size} when it was saved"
        elif is_sparse(status):
            what = "is nearly all hole"
            value = f"{status.st_size} bytes, of which {status.st_blocks * 512} are on the disk"
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        what, value = "is missing" if is_missing else "cannot be read", error.strerror or ""
    return (
        Problem(f"a file of the checkpoint {what}", str(where), value, TAKE_ANOTHER)
        if what
        else None
    )
