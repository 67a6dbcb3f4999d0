"""A .metadata that is a Metadata of PyTorch DCP by name, and of another form inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed.checkpoint.metadata as meta

from automodel_ckpt.checkpoint.files.pickle_records import Record
from automodel_ckpt.checkpoint.files.torch_archive_reading import Fault
from automodel_ckpt.convert.sources.dcp_directory import _content

META = meta.__name__


def record(kind: str, **fields: Any) -> Record:
    made = Record(f"{META}.{kind}")
    made.state = fields
    return made


def metadata(described: object, stored: object) -> Record:
    return record("Metadata", state_dict_metadata=described, storage_data=stored)


def tensor(chunks: object, dtype: str = "F32", size: object = (1,)) -> Record:
    return record(
        "TensorStorageMetadata",
        properties=record("TensorProperties", dtype=dtype),
        chunks=chunks,
        size=size,
    )


INDEX = record("MetadataIndex", fqn="w", offset=(0,))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (metadata([], {}), "lacks state_dict_metadata or storage_data"),
        (metadata({3: tensor([])}, {}), "a name in it is not text"),
        (metadata({}, {"w": 3}), "storage_data is of another form"),
        (
            metadata({}, {INDEX: record("_StorageInfo", relative_path=3)}),
            "storage_data is of another form",
        ),
        (metadata({"w": tensor([], dtype="float33")}, {}), "'w' is not described in full"),
        (metadata({"w": tensor([3], dtype="F32")}, {}), "a chunk of 'w' is not described"),
        (
            metadata({"w": tensor([], dtype="F32", size=-1)}, {}),
            "a shape or an offset in it is not a list of counts",
        ),
        (
            metadata({"w": tensor([], size=(2**31,) * 60)}, {}),
            "the tensor 'w': the dimensions .* are larger than any tensor can have",
        ),
    ],
)
def test_what_is_of_another_form_is_refused(value: Record, said: str) -> None:
    with pytest.raises(Fault, match=said):
        _content(value, 100)


def test_more_is_described_than_there_is_room_for() -> None:
    with pytest.raises(Fault, match="more entries than it has bytes for"):
        _content(metadata({"w": tensor([], dtype="F32")}, {}), 0)
