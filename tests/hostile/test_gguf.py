"""GGUF files that an attacker wrote: an error with code 3, cheap in time and memory, whatever the header claims."""

import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from automodel_ckpt.cli import ckpt
from tests.hostile.harness import bombs
from tests.hostile.harness.commands import check_harmless

U32, STRING, ARRAY = 4, 8, 9
HUGE = 2**63 - 1


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


ARCHITECTURE = entry(b"general.architecture", STRING, text(b"llama"))


def tensor(
    name: bytes = b"a", shape: tuple[int, ...] = (8, 4), kind: int = 0, offset: int = 0
) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def gguf(
    *tensors: bytes,
    values: tuple[bytes, ...] = (ARCHITECTURE,),
    counts: tuple[int, int] | None = None,
    version: int = 3,
    data: int = 128,
) -> bytes:
    counts = counts or (len(tensors), len(values))
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(values) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def array(kind: int, length: int, content: bytes = b"") -> bytes:
    return entry(b"k", ARRAY, struct.pack("<IQ", kind, length) + content)


FILES: dict[str, bytes] = {
    "only_magic": b"GGUF",
    "version_1": gguf(tensor(), version=1),
    "version_huge": gguf(tensor(), version=2**31),
    "big_endian": gguf(tensor(), version=3 << 24),
    "many_tensors": gguf(tensor(), counts=(HUGE, 1)),
    "more_tensors": gguf(tensor(), counts=(2, 1)),
    "many_keys": gguf(tensor(), counts=(1, HUGE)),
    "long_key": gguf(values=(struct.pack("<Q", HUGE),)),
    "key_twice": gguf(tensor(), values=(ARCHITECTURE, ARCHITECTURE)),
    "no_utf8": gguf(tensor(), values=(entry(b"\xff", STRING, text(b"x")),)),
    "value_type": gguf(tensor(), values=(entry(b"k", 99, b""),)),
    "array_huge": gguf(tensor(), values=(array(U32, HUGE),)),
    "array_long": gguf(tensor(), values=(array(STRING, 1 << 23),)),
    "array_of_arrays": gguf(tensor(), values=(array(ARRAY, 1 << 20),)),
    "array_string": gguf(tensor(), values=(array(STRING, 1, struct.pack("<Q", HUGE)),)),
    "alignment_0": gguf(tensor(), values=(entry(b"general.alignment", U32, struct.pack("<I", 0)),)),
    "alignment_text": gguf(tensor(), values=(entry(b"general.alignment", STRING, text(b"x")),)),
    "tensor_type": gguf(tensor(kind=999)),
    "ragged_blocks": gguf(tensor(shape=(33, 2), kind=8)),
    "dimensions": gguf(tensor(shape=(1,) * 5)),
    "huge_shape": gguf(tensor(shape=(2**62, 2**62))),
    "empty_huge": gguf(tensor(shape=(0, 2**62, 2**62))),
    "no_data": gguf(tensor(shape=(2**40,))),
    "truncated": gguf(tensor(), data=64),
    "name_twice": gguf(tensor(), tensor(offset=128), data=256),
    "overlap": gguf(tensor(b"a"), tensor(b"b"), data=256),
    "gap": gguf(tensor(b"a"), tensor(b"b", offset=256), data=512),
    "offset_huge": gguf(tensor(offset=HUGE)),
    "name_control": gguf(tensor(name=b"a\nb")),
    "name_long": gguf(tensor(name=b"a" * 65)),
    "part": gguf(tensor(), values=(ARCHITECTURE, entry(b"split.count", U32, struct.pack("<I", 3)))),
}
CHOSEN = list(FILES) if bombs.EVERY else list(FILES)[1::6]


@pytest.mark.parametrize("name", CHOSEN)
def test_a_hostile_header_is_an_error_and_does_no_harm(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "model.gguf").write_bytes(FILES[name])
    check_harmless(run, "import", run / "model.gguf", run / "imported")


@pytest.mark.parametrize("name", FILES)
def test_the_header_is_rejected_by_itself(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(FILES[name])
    assert ckpt.main(["import", str(path), str(tmp_path / "run"), "--dry-run"]) == 3


@pytest.mark.parametrize("change", ["flip", "cut"])
def test_damage_anywhere_in_the_header_makes_no_traceback(change: str, tmp_path: Path) -> None:
    intact = gguf(
        tensor(b"token_embd.weight", (32, 4), 8),
        values=(ARCHITECTURE, entry(b"llama.block_count", U32, struct.pack("<I", 1))),
        data=136,
    )
    generator = random.Random(5)
    damage: dict[str, Callable[[int], bytes]] = {
        "flip": lambda at: intact[:at] + bytes([generator.randrange(256)]) + intact[at + 1 :],
        "cut": lambda at: intact[:at],
    }
    path = tmp_path / "model.gguf"
    for at in range(0, len(intact) - 136, 1 if bombs.EVERY else 5):
        path.write_bytes(damage[change](at))
        assert ckpt.main(["import", str(path), str(tmp_path / "run"), "--dry-run"]) in (0, 2, 3)


def test_links_and_sparse_files_are_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    with open(path, "wb") as file:
        file.write(gguf(tensor(shape=(2**28,)), data=0))
        file.truncate(2**30 + 4096)
    (tmp_path / "link.gguf").symlink_to(path)
    for file in ("model.gguf", "link.gguf"):
        assert ckpt.main(["import", str(tmp_path / file), str(tmp_path / "run")]) == 3
        assert "cannot be read" in capsys.readouterr().err
