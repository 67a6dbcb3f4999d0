"""Reading and building the header of a safetensors file, without torch and without trust in the file.

Layout (source: the safetensors format, https://github.com/huggingface/safetensors#format): eight bytes little-endian
length n; n bytes of JSON ``{fqn: {"dtype", "shape", "data_offsets": [start, end]}, "__metadata__": {str: str}}``, which
may end in spaces; then the data section, which the tensors fill without hole or overlap.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

from automodel_ckpt.base.other_weights import LFS_HINT, POINTER
from automodel_ckpt.checkpoint.files.dtypes import DTYPE_BITS
from automodel_ckpt.checkpoint.files.safe_open import open_safely, parse_json
from automodel_ckpt.checkpoint.files.type_aliases import MAX_DIMENSIONS, Shape, TextDict, Texts
from automodel_ckpt.checkpoint.parts.slices import Slice, counts, nbytes_of, shape_fault
from automodel_ckpt.errors import unusable

# The safetensors library's own limit; a file with more would not load anywhere.
_WHAT = "not a usable safetensors file"
MAX_HEADER_BYTES = 100_000_000
METADATA_KEY = "__metadata__"
_LENGTH_BYTES = 8
# A sector (files/durable_file.py): O_DIRECT reads and cloned blocks must begin at one.
_ALIGN = 4096


class TensorEntry(NamedTuple):
    """A tensor in a file: safetensors dtype code, shape, and absolute byte range ``start .. end`` of the file."""

    dtype: str
    shape: Shape
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """The contents of a safetensors file."""

    tensors: dict[str, TensorEntry]
    metadata: TextDict = field(default_factory=dict)


class _Fault(Exception):
    """What is wrong with a header; :func:`read_header` adds the file."""


def read_header(path: str | os.PathLike[str], start: int = 0, nbytes: int | None = None) -> Header:
    """The header of the safetensors file at *path*, with every length, key and range checked against the file.

    With *start* and *nbytes*, it is packed in a file at these bytes, and the ranges of the tensors are relative to
    *start*. Raises :class:`CheckpointUnusable` for anything that is not a whole, well-formed safetensors file
    (truncated and over-long files included), and OSError where it cannot be opened.
    """
    # O_NONBLOCK: a pipe that stands where a shard should must not hang the reader.
    # Links are followed, because the Hub's cache consists of links.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode):
        os.close(descriptor)
        raise unusable(_WHAT, str(path), "it is not a regular file")
    size = info.st_size if nbytes is None else nbytes
    with open(descriptor, "rb", closefd=True) as file:
        file.seek(start)
        try:
            length = _header_length(file.read(min(_LENGTH_BYTES, size)), size)
            return _parse(file.read(length), _LENGTH_BYTES + length, size)
        except _Fault as fault:
            raise unusable(_WHAT, str(path), str(fault)) from None


def read_header_safely(
    directory: Path, name: str, start: int = 0, nbytes: int | None = None
) -> Header:
    """The header of a regular file in *directory*; no link is followed. Otherwise as :func:`read_header`."""
    os.close(open_safely(directory, name))
    return read_header(directory / name, start, nbytes)


def build_header(
    entries: Sequence[tuple[str, str, Sequence[int]]], metadata: Texts
) -> tuple[bytes, dict[str, int]]:
    """Header bytes for tensors ``(fqn, dtype, shape)`` stored in that order, and each one's absolute start.

    The header is padded with spaces so that the data section begins at a multiple of 4096 bytes. Raises ValueError
    for a name given twice and for a header over the format's limit.
    """
    document: dict[str, object] = {METADATA_KEY: dict(metadata)} if metadata else {}
    at, relative = 0, {}
    for fqn, dtype, shape in entries:
        if fqn in relative or fqn == METADATA_KEY:
            raise ValueError(f"tensor name {fqn!r} is given twice or reserved")
        end = at + nbytes_of(dtype, shape)
        document[fqn] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        relative[fqn], at = at, end
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    data_start = -(-(_LENGTH_BYTES + len(text)) // _ALIGN) * _ALIGN
    length = data_start - _LENGTH_BYTES
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"the header takes {length} bytes, the format allows {MAX_HEADER_BYTES}")
    header = length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length)
    return header, {fqn: data_start + start for fqn, start in relative.items()}


def shard_header(slices: Sequence[tuple[Slice, Shape]]) -> tuple[bytes, dict[str, int]]:
    """As :func:`build_header`, for a shard with these slices in this order, each with the shape of its tensor."""
    # The keys of torch/distributed/checkpoint/_hf_utils.py; global_shape is an addition.
    sharding = {
        stored.fqn: {"saved_offsets": list(stored.offsets), "global_shape": list(shape)}
        for stored, shape in slices
    }
    info = json.dumps(sharding, separators=(",", ":"))
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": info}
    return build_header([(each.fqn, each.dtype, each.sizes) for each, _ in slices], metadata)


def _header_length(prefix: bytes, file_bytes: int) -> int:
    if len(prefix) < _LENGTH_BYTES:
        raise _Fault(f"it has {file_bytes} bytes, too few for a header")
    length = int.from_bytes(prefix, "little")
    if prefix == POINTER[: len(prefix)]:
        raise _Fault(LFS_HINT)
    if length > MAX_HEADER_BYTES:
        raise _Fault(f"its header has {length} bytes, the format allows {MAX_HEADER_BYTES}")
    if _LENGTH_BYTES + length > file_bytes:
        raise _Fault(f"its header has {length} bytes, but the file has {file_bytes}")
    return length


def _parse(text: bytes, data_start: int, file_bytes: int) -> Header:
    try:
        document = parse_json(
            text.decode(), object_pairs_hook=_without_duplicates, parse_constant=_reject_constant
        )
    except ValueError as error:
        raise _Fault(f"its header is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise _Fault("its header is not a JSON object")
    metadata = document.pop(METADATA_KEY, None)
    if metadata is None:  # MLX writes null
        metadata = {}
    is_text = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if not is_text:
        raise _Fault(f"{METADATA_KEY} is not a mapping of text to text")
    tensors = {fqn: _entry(fqn, entry, data_start) for fqn, entry in document.items()}
    at, before = data_start, "the header"
    # An empty tensor begins where the next one does, and has to come first.
    for fqn, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != at:
            raise _Fault(f"{fqn!r} does not begin where {before} ends")
        at, before = entry.end, repr(fqn)
    if at != file_bytes:
        raise _Fault(f"its tensors end at byte {at}, the file at byte {file_bytes}")
    return Header(tensors, metadata)


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # json keeps the last of two equal names without an error.
    result = {}
    for key, value in pairs:
        if key in result:
            raise _Fault(f"its header names {key!r} twice")
        result[key] = value
    return result


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"it has {name}")


def _entry(fqn: str, entry: object, data_start: int) -> TensorEntry:
    if any("\ud800" <= character <= "\udfff" for character in fqn):
        raise _Fault(f"the tensor name {fqn!r} is not valid Unicode")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _Fault(f"the entry of {fqn!r} does not hold exactly dtype, shape and data_offsets")
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _Fault(f"{fqn!r} has the unknown dtype {dtype!r}")
    shape, offsets = counts(entry["shape"]), counts(entry["data_offsets"])
    if shape is None or offsets is None or len(shape) > MAX_DIMENSIONS:
        raise _Fault(f"the shape or data_offsets of {fqn!r} are not a few non-negative integers")
    if fault := shape_fault(shape):
        raise _Fault(f"{fqn!r}: {fault}")
    if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes_of(dtype, shape):
        raise _Fault(
            f"{fqn!r} of dtype {dtype} and shape {list(shape)} does not take the bytes {list(offsets)}"
        )
    return TensorEntry(dtype, shape, data_start + offsets[0], data_start + offsets[1])
