"""Faults that only a damaged file or a failing system call brings about, each met where it is looked for."""

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.checkpoint.export import files as export_files
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault, archive_ranges
from automodel_ckpt.consolidate import main as consolidate
from automodel_ckpt.convert.formats.torch.dcp import PyTorchDcp
from automodel_ckpt.errors import CheckpointUnusable
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
        (torch.ones(3), {"data/0": bytes(12)}, r"not a plain tensor of F32 \[2\]"),
        (torch.ones(2).half(), {"data/0": bytes(4)}, r"not a plain tensor of F32 \[2\]"),
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
        PyTorchDcp().open(directory)


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
