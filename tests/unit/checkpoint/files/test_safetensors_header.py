"""The header reader trusts nothing; the builder makes files that the safetensors library reads."""

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from automodel_ckpt.checkpoint.files import safetensors_header
from automodel_ckpt.checkpoint.files.safetensors_header import (
    TensorEntry,
    build_header,
    read_header,
)
from automodel_ckpt.errors import CheckpointUnusable


def write_raw(path: Path, document: object, body: bytes = b"") -> Path:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def fault_of(path: Path) -> str:
    with pytest.raises(CheckpointUnusable) as caught:
        read_header(path)
    assert str(path) in caught.value.problems[0].where
    return str(caught.value.problems[0].value)


def test_a_built_file_is_read_by_the_safetensors_library_and_by_us(tmp_path: Path) -> None:
    matrix, flag = np.arange(6, dtype=np.float32).reshape(2, 3), np.array(True)
    header, starts = build_header(
        [("m", "F32", (2, 3)), ("é\n", "BOOL", ()), ("e", "I64", (0, 4))], {"format": "pt"}
    )
    path = tmp_path / "f.safetensors"
    path.write_bytes(header + matrix.tobytes() + flag.tobytes())
    loaded = load_file(path)
    assert (
        np.array_equal(loaded["m"], matrix)
        and loaded["é\n"] == flag
        and loaded["e"].shape == (0, 4)
    )
    read = read_header(path)
    assert read.tensors["m"] == TensorEntry("F32", (2, 3), 4096, 4120) and starts["é\n"] == 4120
    assert read.metadata == {"format": "pt"} and len(header) == 4096


def test_a_name_given_twice_or_reserved_is_not_built() -> None:
    for names in (("a", "a"), ("__metadata__",)):
        with pytest.raises(ValueError, match="twice or reserved"):
            build_header([(name, "U8", ()) for name in names], {})


@pytest.mark.parametrize(
    ("document", "body", "fault"),
    [
        (b"{", b"", "not JSON"),
        (b"[" * 100_000, b"", "not JSON"),
        (b"\xff\xfe", b"", "not JSON"),
        (b'{"a":NaN}', b"", "not JSON"),
        ([], b"", "not a JSON object"),
        (b'{"__metadata__":{"k":"1","k":"2"}}', b"", "'k' twice"),
        ({"__metadata__": {"k": 1}}, b"", "text to text"),
        ({"a": {"dtype": "F32"}}, b"", "exactly dtype"),
        ({"a": entry("F3", [1], 0, 4)}, bytes(4), "unknown dtype 'F3'"),
        ({"a": entry("F32", [-1], 0, 4)}, bytes(4), "non-negative"),
        ({"a": entry("F32", [True], 0, 4)}, bytes(4), "non-negative"),
        ({"a": entry("F32", [2**64], 0, 4)}, bytes(4), "non-negative"),
        ({"a": entry("F32", [1] * 65, 0, 4)}, bytes(4), "not a few non-negative integers"),
        ({"a": entry("F32", [0, 2**62], 0, 0)}, b"", "larger than any tensor can have"),
        ({"a": entry("F32", [2], 0, 4)}, bytes(4), "does not take the bytes"),
        ({"a": entry("F32", [1], 4, 0)}, bytes(4), "does not take the bytes"),
        (
            {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)},
            bytes(6),
            "'b' does not begin where 'a' ends",
        ),
        (
            {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 5, 9)},
            bytes(9),
            "does not begin where 'a' ends",
        ),
        ({"a": entry("U8", [4], 0, 4)}, bytes(3), "its tensors end at byte"),
        ({"a": entry("U8", [4], 0, 4)}, bytes(5), "its tensors end at byte"),
        (b'{"a\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', b"", "not valid Unicode"),
    ],
)
def test_a_malformed_file_is_refused_with_its_fault(
    tmp_path: Path, document: object, body: bytes, fault: str
) -> None:
    assert fault in fault_of(write_raw(tmp_path / "f.safetensors", document, body))


def test_a_tensor_named_twice_is_refused(tmp_path: Path) -> None:
    one = json.dumps(entry("U8", [1], 0, 1))
    text = f'{{"a":{one},"a":{one}}}'.encode()
    assert "'a' twice" in fault_of(write_raw(tmp_path / "f.safetensors", text, b"x"))


def test_a_pipe_in_place_of_a_shard_does_not_hang(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    os.mkfifo(path)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(fault_of(path)), daemon=True)
    thread.start()
    thread.join(timeout=120)
    assert found == ["it is not a regular file"]


def test_a_header_of_the_largest_size_is_read_and_built_and_a_larger_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_raw(tmp_path / "f", {"w": entry("U8", [2], 0, 2)}, b"ab")
    length = int.from_bytes(path.read_bytes()[:8], "little")
    monkeypatch.setattr(safetensors_header, "MAX_HEADER_BYTES", length)
    assert set(read_header(path).tensors) == {"w"}
    monkeypatch.setattr(safetensors_header, "MAX_HEADER_BYTES", length - 1)
    assert f"its header has {length} bytes, the format allows {length - 1}" in fault_of(path)
    monkeypatch.undo()
    header, _ = build_header([("w", "U8", (2,))], {})
    monkeypatch.setattr(safetensors_header, "MAX_HEADER_BYTES", len(header) - 8)
    assert build_header([("w", "U8", (2,))], {})[0] == header
    monkeypatch.setattr(safetensors_header, "MAX_HEADER_BYTES", len(header) - 9)
    with pytest.raises(ValueError, match="the format allows"):
        build_header([("w", "U8", (2,))], {})
