"""Models in several GGUF files, which the writer of llama.cpp made (tests/fixtures/gguf/make_split.py)."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from automodel_ckpt.checkpoint.tensors.stored import whole
from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.convert.open import open_source

FIXTURES = Path(__file__).parents[3] / "fixtures" / "gguf"
PARTS = FIXTURES / "llama-parts"
FIRST = "model-00001-of-00004.gguf"
Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("number", [1, 3])
def test_any_part_stands_for_the_whole_model(number: int) -> None:
    pytest.importorskip("gguf")
    source = open_source(PARTS / f"model-{number:05d}-of-00004.gguf")
    expected = json.loads((FIXTURES / "llama-q8_0" / "expected.json").read_text())
    assert source.tensors.keys() == expected.keys()
    for fqn, (shape, digest) in expected.items():
        values = whole(source.root, source.tensors[fqn])
        assert list(values.shape) == shape
        assert hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest() == digest, fqn
    assert source.side_files is not None and (source.side_files / "config.json").is_file()


def test_links_with_other_names_are_followed(tmp_path: Path) -> None:
    """In the Hub's cache, every part is a link to a file that is called after its digest."""
    pytest.importorskip("gguf")
    for number, part in enumerate(sorted(PARTS.iterdir())):
        blob = tmp_path / f"blob{number}"
        shutil.copy(part, blob)
        (tmp_path / part.name).symlink_to(blob)
    run = tmp_path / "run"
    assert main(["import", str(tmp_path / FIRST), str(run)]) == 0
    assert main(["diff", str(run), str(FIXTURES / "llama-q8_0" / "model.gguf")]) == 0


def error_of(path: Path, capsys: Capture) -> str:
    assert main(["import", str(path), str(path.parent / "run")]) == 3
    assert not (path.parent / "run").exists()
    return capsys.readouterr().err


def test_parts_that_do_not_belong_together_are_errors(tmp_path: Path, capsys: Capture) -> None:
    source = Path(shutil.copytree(PARTS, tmp_path / "parts"))
    second, third = (source / f"model-0000{number}-of-00004.gguf" for number in (2, 3))
    content = third.read_bytes()
    third.unlink()
    assert "a part of this model is missing" in error_of(source / FIRST, capsys)
    shutil.copy(second, third)
    assert "states another place in the model" in error_of(source / FIRST, capsys)
    # The same part again, as if it were the third one.
    copy = second.read_bytes().replace(number_entry(b"split.no", 1), number_entry(b"split.no", 2))
    third.write_bytes(copy)
    assert "two parts of this model have a tensor of the same name" in error_of(
        source / FIRST, capsys
    )
    third.write_bytes(content[:-32])
    assert "damaged" in error_of(source / FIRST, capsys)
    third.write_bytes(content)
    renamed = (source / FIRST).rename(source / "model.gguf")
    text = error_of(renamed, capsys)
    assert "does not state its place in the model" in text and "one of 4" in text


def test_a_hostile_number_of_parts_is_an_error(tmp_path: Path, capsys: Capture) -> None:
    source = Path(shutil.copytree(PARTS, tmp_path / "parts"))
    path = source / FIRST
    many = number_entry(b"split.count", 60_000)
    path.write_bytes(path.read_bytes().replace(number_entry(b"split.count", 4), many))
    assert "the number of this model's parts is not valid" in error_of(path, capsys)
    total = b"split.tensors.count" + struct.pack("<I", 5)
    path.write_bytes((PARTS / FIRST).read_bytes().replace(total + b"\x15", total + b"\x16"))
    assert "do not have all tensors" in error_of(path, capsys)


def number_entry(key: bytes, number: int) -> bytes:
    """Return a key with a value of 16 bits, as the writer of llama.cpp stores it."""
    return key + struct.pack("<IH", 2, number)
