"""Faults that only a damaged file or a failing system call brings about, each met where it is looked for."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from automodel_ckpt.checkpoint.export import files as export_files
from automodel_ckpt.checkpoint.files import durable_file, layout
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.pickles import pickle_reader
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import (
    Fault,
    archive_ranges,
    archive_records,
)
from automodel_ckpt.checkpoint.sources import base_maps
from automodel_ckpt.checkpoint.sources import opening as export_source
from automodel_ckpt.checkpoint.sources.base_maps import BaseMaps
from automodel_ckpt.consolidate import main as consolidate
from automodel_ckpt.convert.formats.registry import DCP
from automodel_ckpt.convert.imports import import_checkpoint
from automodel_ckpt.convert.open import open_source
from automodel_ckpt.convert.publishing import published_file
from automodel_ckpt.convert.targets import gguf
from automodel_ckpt.convert.targets.flow import export_to
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed
from tests.support.models.llamas import llama_checkpoint
from tests.support.models.shards import checkpoint_in
from tests.unit.checkpoint.export.test_dcp_source import save as save_dcp

Patch = pytest.MonkeyPatch


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


ARCHIVE = saved([torch.ones(3), torch.zeros(2)])
"""Two tensors of torch.save; its directory is the last 22 bytes and what they point at."""


def changed(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


END = int.from_bytes(ARCHIVE[-34:-26], "little")
"""Where the record of its directory begins: number of records, bytes and start are its last three numbers."""


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (changed(ARCHIVE, END + 48, bytes(8)), "not where it should be"),
        (
            changed(ARCHIVE, END + 32, (1).to_bytes(8, "little")),
            "the archive's directory is damaged",
        ),
        (changed(ARCHIVE, 0, b"XX"), "does not begin where the directory states"),
    ],
)
def test_an_archive_whose_directory_is_damaged(data: bytes, said: str) -> None:
    assert len(archive_ranges(ARCHIVE)) > 2
    with pytest.raises(Fault, match=said):
        archive_ranges(data)


def nested(depth: int) -> tuple[object, ...]:
    return () if depth == 0 else (nested(depth - 1),)


class OfAModule(pickle.Pickler):
    """Refers to what torch has not referred to for years."""

    def persistent_id(self, value: object) -> object:
        return ("module", "x", "0", "cpu", 1) if isinstance(value, SimpleNamespace) else None


def archive_of(program: bytes, **others: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in (
            {"data.pkl": program, "byteorder": b"little", "version": b"3\n"} | others
        ).items():
            archive.writestr(f"archive/{name}", data)
    return buffer.getvalue()


def program_of(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read("archive/data.pkl")


def reference() -> bytes:
    buffer = io.BytesIO()
    OfAModule(buffer, 2).dump(SimpleNamespace())
    return archive_of(buffer.getvalue())


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (saved(nested(pickle_reader.MAX_TUPLES + 2)), "nested more than"),
        (saved(torch.ones(1).expand(30_000_000)), "is stored in too few bytes"),
        (reference(), "it refers to a 'module'"),
        (archive_of(program_of(saved({})), byteorder=b"big"), "a machine of the other byte order"),
    ],
)
def test_state_that_would_cost_more_than_it_holds(data: bytes, said: str) -> None:
    with pytest.raises(CheckpointUnusable, match=said):
        pickle_reader.load(data, "here")


@pytest.mark.parametrize(
    ("tensor", "others", "said"),
    [
        (
            torch.ones(2),
            {"byteorder": b"big", "data/0": bytes(8)},
            "a machine of the other byte order",
        ),
        (torch.ones(2), {"data/0": bytes(4)}, "its record has 4 bytes, not 8"),
        (torch.ones(2), {}, "its record has 0 bytes, not 8"),
        (torch.ones(3), {"data/0": bytes(12)}, "a tensor of another shape"),
        (torch.ones(2).half(), {"data/0": bytes(4)}, "or of another dtype than F32"),
        (None, {}, "it is not a plain tensor"),
        ("x" * 100_000, {}, "its record data.pkl takes"),
    ],
)
def test_an_item_of_dcp_that_is_not_what_its_description_says(
    tmp_path: Path, tensor: object, others: dict[str, bytes], said: str
) -> None:
    directory = save_dcp(tmp_path / "dcp", {"w": torch.ones(2)})
    item = archive_of(program_of(saved(tensor)), **others)
    (directory / "__0_0.distcp").write_bytes(item)
    metadata = pickle.loads((directory / layout.DCP_METADATA).read_bytes())
    (place,) = metadata.storage_data.values()
    place.offset, place.length = 0, len(item)
    (directory / layout.DCP_METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointUnusable, match=rf"the stored chunk at \[0\] of 'w'[\s\S]*{said}"):
        DCP.open(directory)


def links_to_itself(directory: Path) -> object:
    (directory / layout.DCP_METADATA).symlink_to("elsewhere")
    return DCP.open(directory)


def broken_map(directory: Path) -> object:
    (directory / "map.json").write_text("{")
    return base_maps._read_map(directory, "map.json")


def of_another_config(directory: Path) -> object:
    pytest.importorskip("gguf")
    llama_checkpoint(directory / "c", tied=True, dtype=torch.float32)
    config = directory / "c/model" / layout.HF_METADATA / "config.json"
    config.write_text(json.dumps(json.loads(config.read_bytes()) | {"intermediate_size": 7}))
    (directory / "c" / layout.MANIFEST).unlink()
    return export_to("gguf", directory / "c/model", directory / "model.gguf")


def broken_template(directory: Path) -> object:
    (directory / "chat_template.jinja").write_bytes(b"\xff")
    return gguf._chat_template(directory, None)


def full(directory: Path) -> object:
    with published_file(directory / "model.gguf", logging.debug, what="the GGUF file"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("provoke", "said"),
    [
        (links_to_itself, "a checkpoint contains a symbolic link"),
        (broken_map, "this side file cannot be read"),
        (
            lambda d: base_maps._file_numbers({"a": 0}, d),
            "no.* file numbers from 1|not give file numbers",
        ),
        (lambda d: export_source._shards(d / "gone"), "directory of the shards cannot be read"),
        (lambda d: open_source(d / "gone"), "there is no such checkpoint directory"),
        (lambda d: export_files.agreeing_config(b"[1]", None, BaseMaps(), d), "not a JSON mapping"),  # type: ignore[arg-type]
        (of_another_config, "the tensors are not those of the config"),
        (broken_template, "the chat template cannot be read"),
        (
            lambda d: import_checkpoint.prepare(d / ("x" * 300), d),
            "a file to import cannot be read",
        ),
        (full, "ENOSPC"),
    ],
)
def test_what_cannot_be_read_or_written_is_said_with_its_place(
    tmp_path: Path, provoke: Callable[[Path], object], said: str
) -> None:
    with pytest.raises((CheckpointUnusable, SaveFailed), match=said) as caught:
        provoke(tmp_path)
    (problem,) = caught.value.problems
    assert str(tmp_path) in problem.where and problem.hint


def test_a_side_file_that_is_too_large_to_be_one(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = checkpoint_in(tmp_path, 20, scripted=True)
    side = checkpoint / "model" / layout.HF_METADATA / "tokenizer.json"
    side.write_text(json.dumps({"a": 1}))
    manifest = checkpoint / layout.MANIFEST
    manifest.unlink()
    monkeypatch.setattr(export_files, "MAX_SIDE_BYTES", 1)
    assert (
        consolidate(
            ["--input-dir", str(checkpoint / "model"), "--output-dir", str(tmp_path / "out")]
        )
        == 3
    )
    assert "a file of the model cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_system_calls_that_fail_are_not_taken_for_missing_ones(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        commit.exchange(tmp_path / "a", tmp_path / "b")
    path = tmp_path / "file"
    path.touch()
    descriptor = os.open(path, os.O_RDONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        durable_file.reserve_range(descriptor, 0, 1)
    os.close(descriptor)


def test_a_rank_manifest_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"\.rank_00001"):
        commit.write_by_rename(tmp_path / "rank_00001", b"")


def zip64(content: bytes, *, length: int | None = None, position: int = 0) -> bytes:
    """An archive of one record, whose sizes and offset are in the extra field for 64-bit numbers."""
    length = len(content) if length is None else length
    head = struct.pack("<4s5H3I2H", b"PK\x03\x04", 45, 0, 0, 0, 0, 0, length, length, 3, 0) + b"a/b"
    start = len(head) + len(content)
    extra = (
        struct.pack("<HH", 9, 2) + b"??" + struct.pack("<HHQQQ", 1, 24, length, length, position)
    )
    wide = 0xFFFFFFFF
    entry = struct.pack(
        "<4s6H3I5H2I",
        *(b"PK\x01\x02", 45, 45, 0, 0, 0, 0),
        *(0, wide, wide, 3, len(extra), 0, 0, 0, 0, wide),
    )
    directory = entry + b"a/b" + extra
    end = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, len(directory), start)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, start + len(directory), 1)
    last = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, wide, wide, 0)
    return head + content + directory + end + locator + last


def test_sizes_and_positions_of_64_bits_are_read_from_the_extra_field() -> None:
    records = archive_records(zip64(b"content"))
    assert {name: bytes(data) for name, data in records.items()} == {"b": b"content"}
    with pytest.raises(Fault, match="not in the archive"):
        archive_records(zip64(b"content", length=8))
    assert bytes(archive_records(zip64(b"content", length=6))["b"]) == b"conten"
    with pytest.raises(Fault, match="does not begin where"):
        archive_records(zip64(b"content", position=1))
