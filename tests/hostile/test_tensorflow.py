"""Indexes of TensorFlow checkpoints that an attacker wrote, with correct checksums: reading them stays cheap."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from automodel_ckpt.cli import ckpt
from tests.hostile.harness import bombs
from tests.hostile.harness.commands import check_harmless

MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
HEADER = b"\x08\x01\x1a\x02\x08\x01"
DATA = "m.data-00000-of-00001"


def varint(value: int) -> bytes:
    encoded = b""
    while value > 127:
        encoded += bytes([value & 127 | 128])
        value >>= 7
    return encoded + bytes([value])


def item(key: bytes, value: bytes, shared: int = 0) -> bytes:
    return varint(shared) + varint(len(key)) + varint(len(value)) + key + value


def masked_crc(data: bytes) -> int:
    """The masked CRC-32C of *data* (source: tensorflow/core/lib/hash/crc32c.h)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def block(*items: bytes, compression: int = 0) -> bytes:
    content = b"".join(items) + struct.pack("<II", 0, 1) + bytes([compression])
    return content + struct.pack("<I", masked_crc(content))


def table(*blocks: bytes, order: tuple[int, ...] = ()) -> bytes:
    """Return a table of *blocks*, listed in *order*."""
    data = b""
    handles = []
    for content in blocks:
        handles.append(varint(len(data)) + varint(len(content) - 5))
        data += content
    listed = [item(b"%09d" % n, handles[k]) for n, k in enumerate(order or range(len(blocks)))]
    index, empty = block(*listed), block()
    footer = varint(len(data)) + varint(len(empty) - 5)
    footer += varint(len(data) + len(empty)) + varint(len(index) - 5)
    return data + empty + index + footer.ljust(40, b"\0") + MAGIC


def entry(*, dtype: int = 1, dims: tuple[int, ...] = (2,), **numbers: int) -> bytes:
    shape = b""
    for extent in dims:
        dimension = b"\x08" + varint(extent)
        shape += b"\x12" + varint(len(dimension)) + dimension
    message = b"\x08" + varint(dtype) + b"\x12" + varint(len(shape)) + shape
    for field, name in ((3, "shard"), (4, "offset"), (5, "size")):
        message += varint(field << 3) + varint(numbers.get(name, 8 if name == "size" else 0))
    return message


def one(message: bytes, name: bytes = b"w") -> Callable[[], bytes]:
    return lambda: table(block(item(b"", HEADER), item(name, message)))


def repeated_block() -> bytes:
    first = block(item(b"", HEADER), item(b"w", entry()))
    return table(first, order=(0,) * 50_000)


def shared_names() -> bytes:
    long = item(b"n" * 4000, entry())
    others = [item(b"%06d" % number, b"", shared=4000) for number in range(90_000)]
    return table(block(item(b"", HEADER), long, *others))


INDEXES: dict[str, Callable[[], bytes]] = {
    "giant_shape": one(entry(dims=(1 << 40, 1 << 40))),
    "negative_shape": one(entry(dims=((1 << 64) - 1,))),
    "many_dimensions": one(entry(dims=(1,) * 1000)),
    "another_size": one(entry(dims=(4,))),
    "beyond_the_end": one(entry(offset=1 << 50)),
    "another_shard": one(entry(shard=1 << 31)),
    "unknown_dtype": one(entry(dtype=99)),
    "control_characters": one(entry(), b"a\x1b[2J"),
    "not_utf8": one(entry(), b"\xff\xfe"),
    "no_message": one(b"\xff" * 20),
    "truncated_message": one(b"\x12\x7f"),
    "big_endian": lambda: table(block(item(b"", b"\x08\x01\x10\x01"), item(b"w", entry()))),
    "no_header": lambda: table(block(item(b"w", entry()))),
    "many_shards": lambda: table(block(item(b"", b"\x08\xff\xff\xff\x0f"), item(b"w", entry()))),
    "unordered": lambda: table(
        block(item(b"", HEADER), item(b"w", entry()), item(b"a", entry(offset=8)))
    ),
    "twice": lambda: table(block(item(b"", HEADER), item(b"w", entry()), item(b"w", entry()))),
    "compressed": lambda: table(block(item(b"", HEADER), item(b"w", entry()), compression=1)),
    "shared_too_long": lambda: table(block(item(b"", HEADER), item(b"w", entry(), shared=9))),
    "repeated_block": repeated_block,
    "shared_names": shared_names,
    "only_a_footer": lambda: bytes(40) + MAGIC,
    "no_weights": lambda: table(block(item(b"", HEADER))),
}
NAMES = sorted(INDEXES)
# HOSTILE=all (make hostile) runs every file; else every fourth.
CHOSEN = NAMES if bombs.EVERY else NAMES[1::4]


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("source", [".", "m.index"])
def test_a_hostile_index_is_an_error_and_stays_cheap(
    name: str, source: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    (run / "source").mkdir(parents=True)
    (run / "source" / "m.index").write_bytes(INDEXES[name]())
    (run / "source" / DATA).write_bytes(bytes(16))
    check_harmless(run, "import", run / "source" / source, run / "imported")


def test_an_index_like_those_above_with_a_correct_entry_is_read(tmp_path: Path) -> None:
    (tmp_path / "m.index").write_bytes(one(entry(offset=8))())
    (tmp_path / DATA).write_bytes(bytes(16))
    assert ckpt.main(["import", str(tmp_path), str(tmp_path / "run")]) == 0
