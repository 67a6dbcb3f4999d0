"""Archives that are small on disk and large in memory, and pickles that run code."""

import functools
import io
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

MEGABYTE = 1 << 20
EVERY = os.environ.get("HOSTILE") == "all"
"""Whether all attacks are made, at their full size."""
BOMB_BYTES = 700 * MEGABYTE


class Hostile:
    """Its pickle makes *marker* when it is read."""

    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self._marker}'",)


def archive(records: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, data in {"byteorder": b"little", "version": b"3\n", **records}.items():
            file.writestr(f"archive/{name}", data)
    return buffer.getvalue()


def executing_pickles(marker: Path) -> dict[str, bytes]:
    """Ways in which a pickle asks for code to be run."""
    command = f"touch '{marker}'".encode()
    text = b"X" + struct.pack("<I", len(command)) + command
    build = (
        b"\x80\x02ccollections\nOrderedDict\n)R}X\x0c\x00\x00\x00__setstate__cos\nsystem\nsb"
        + text
        + b"b."
    )
    return {
        "reduce": pickle.dumps(Hostile(marker), protocol=2),
        "stack_global": pickle.dumps(Hostile(marker), protocol=4),
        "global": b"cos\nsystem\n(" + text + b"tR.",
        "inst": b"(S'" + command.replace(b"'", b'"') + b"'\nios\nsystem\n.",
        "build": build,
        "import": b"chostile_module\nrun\n)R.",
        "eval": b"c__builtin__\neval\n(X" + struct.pack("<I", 10) + b"__import__tR.",
        "nested": b"ctorch.storage\n_load_from_bytes\n("
        + _binary(pickle.dumps(Hostile(marker), protocol=2))
        + b"tR.",
        "getattr": b"c__builtin__\ngetattr\n(cos\npath\nX\x02\x00\x00\x00ostR.",
    }


def _binary(data: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(data)) + data


def executing_state(marker: Path) -> dict[str, bytes]:
    """The same as what torch.save would have written, and bare; and an archive within an archive."""
    pickles = executing_pickles(marker)
    states = {f"archived_{name}": archive({"data.pkl": data}) for name, data in pickles.items()}
    states["bare"] = pickles["reduce"]
    states["legacy"] = (
        pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickles["reduce"] * 3
    )
    states["tar"] = _tar(pickles["reduce"])
    states["script"] = archive(
        {"data.pkl": pickles["reduce"], "constants.pkl": pickles["reduce"], "code/a.py": b""}
    )
    return states


def _tar(data: bytes) -> bytes:
    import tarfile

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            file.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _saved(value: object) -> dict[str, bytes]:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with zipfile.ZipFile(buffer) as file:
        return {entry.filename.partition("/")[2]: file.read(entry) for entry in file.infolist()}


@functools.cache
def compressed_tensor() -> bytes:
    """A tensor of 700 MB whose record is compressed."""
    records = _saved({"value": torch.zeros(4, dtype=torch.uint8)})
    records["data.pkl"] = _counting(records["data.pkl"], BOMB_BYTES)
    return _deflated(records, "data/0", b"", BOMB_BYTES // MEGABYTE, b"")


def _counting(data: bytes, numel: int, tensors: int = 1) -> bytes:
    """The pickle of one-dimensional tensors of 4 elements, with another number of them."""
    count = b"J" + struct.pack("<i", numel)
    data = data.replace(b"K\x04t", count + b"t", tensors)
    return data.replace(b"K\x04\x85", count + b"\x85", tensors)


@functools.cache
def compressed_pickle() -> bytes:
    """A pickle of 300 MB, compressed."""
    head = b"\x80\x02}X\x05\x00\x00\x00valueX" + struct.pack("<I", 300 * MEGABYTE)
    return _deflated({}, "data.pkl", head, 300, b"s.")


def _deflated(
    records: Mapping[str, bytes], name: str, head: bytes, megabytes: int, tail: bytes
) -> bytes:
    """The archive of *records* and one more, compressed: head, zeros, tail. The zeros are compressed once for all."""
    zeros = bytes(MEGABYTE)
    blocks = zlib.compressobj(1, zlib.DEFLATED, -15)
    one = blocks.compress(zeros) + blocks.flush(zlib.Z_FULL_FLUSH)
    ends = []
    for data, mode in ((head, zlib.Z_FULL_FLUSH), (tail, zlib.Z_FINISH)):
        end = zlib.compressobj(1, zlib.DEFLATED, -15)
        ends.append(end.compress(data) + end.flush(mode))
    packed = ends[0] + one * megabytes + ends[1]
    crc = zlib.crc32(head)
    for _ in range(megabytes):
        crc = zlib.crc32(zeros, crc)
    plain = bytearray(archive({**records, name: packed}))
    size = len(head) + megabytes * MEGABYTE + len(tail)
    fields = struct.pack("<III", zlib.crc32(tail, crc), len(packed), size)
    path = f"archive/{name}".encode()
    for place, method, sums in ((plain.index(path) - 30, 8, 14), (plain.rindex(path) - 46, 10, 16)):
        plain[place + method : place + method + 2] = struct.pack("<H", zipfile.ZIP_DEFLATED)
        plain[place + sums : place + sums + 12] = fields
    return bytes(plain)


@functools.cache
def overlapping_records() -> bytes:
    """Sixty tensors of 16 MB, whose records in the archive's directory are all the same bytes."""
    count, size = 60, 16 * MEGABYTE
    records = _saved({"value": [torch.zeros(4, dtype=torch.uint8) for _ in range(count)]})
    kept = {name: data for name, data in records.items() if not name.startswith("data/")}
    kept["data.pkl"] = _counting(kept["data.pkl"], size, count)
    plain = archive(
        {**kept, **{f"data/{index}": b"" for index in range(1, count)}, "data/0": bytes(size)}
    )
    at = plain.index(b"PK\x01\x02")
    directory, end = (
        bytearray(plain[at : plain.rindex(b"PK\x05\x06")]),
        plain[plain.rindex(b"PK\x05\x06") :],
    )
    entries = bytes(directory).split(b"PK\x01\x02")[1:]
    big = entries[-1]
    changed = [_pointing(entry, big) if b"/data/" in entry else entry for entry in entries]
    return plain[:at] + b"".join(b"PK\x01\x02" + entry for entry in changed) + end


def _pointing(entry: bytes, to: bytes) -> bytes:
    """A directory entry with the checksum, sizes and offset of another one (fields of PKWARE APPNOTE 4.3.12)."""
    return entry[:12] + to[12:24] + entry[24:38] + to[38:42] + entry[42:]


def storage_beyond_its_record() -> bytes:
    """A tensor of a million bytes with a record of four: what lies behind it in memory is not the file's to read."""
    records = _saved({"value": torch.zeros(4, dtype=torch.uint8)})
    return archive({**records, "data.pkl": _counting(records["data.pkl"], 1_000_000)})


def pickled(program: bytes) -> bytes:
    """An archive of the state ``{"value": ...}`` with this program in place of the value."""
    return archive({"data.pkl": b"\x80\x02}X\x05\x00\x00\x00value" + program + b"s."})


def large_allocations() -> dict[str, bytes]:
    """Short programs that ask for much memory, time or stack without any code in them."""
    large = b"J" + struct.pack("<i", BOMB_BYTES)
    laughs = b"]q\x00" + b"".join(b"](h%ch%ce" % (i, i) + b"q" + bytes([i + 1]) for i in range(60))
    return {
        "bytearray": pickled(b"cbuiltins\nbytearray\n" + large + b"\x85R"),
        "bytearray_python2": pickled(b"c__builtin__\nbytearray\n" + large + b"\x85R"),
        "tensor_of_a_size": pickled(b"ctorch\nTensor\n" + large + b"\x85R"),
        "deep_tuple_as_key": pickled(b"})" + b"\x85" * 300_000 + b"K\x01s"),
        "deep_tuple_in_set": pickled(b"cbuiltins\nset\n])" + b"\x85" * 300_000 + b"a\x85R"),
        "deep_list": pickled(b"]" * 300_000 + b"a" * 299_999),
        "billion_laughs": pickled(laughs),
        "memo_index": pickled(b"K\x01r\xff\xff\xff\x7f"),
        "long_text_stated": pickled(b"X\xff\xff\xff\x7fabc"),
        "long_number_stated": pickled(b"\x8b\xff\xff\xff\x7fabc"),
        "bytes_stated": pickled(b"\x8e\xff\xff\xff\xff\x00\x00\x00\x00abc"),
        "frame_stated": pickled(b"\x95\xff\xff\xff\xff\x00\x00\x00\x00K\x01"),
        "nothing": b"",
        "no_stop": archive({"data.pkl": b"\x80\x02}"}),
        "empty_stack": archive({"data.pkl": b"\x80\x02."}),
        "no_archive": b"PK\x03\x04" + bytes(100),
        "no_pickle": archive({}),
        "codec": pickled(b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x0b\x00\x00\x00hostile_one\x86R"),
        "another_form": archive({"data.pkl": b"\x80\x02K\x01."}),
    }
