"""A .metadata that is a Metadata of PyTorch DCP by name, and of another form inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed.checkpoint.metadata as meta

from automodel_ckpt.checkpoint.pickles.pickle_records import RECORD, Record, read_records
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault
from automodel_ckpt.convert.formats.torch.dcp_directory import _content

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


def pickled(program: bytes) -> bytes:
    """A program of protocol 4 without frames."""
    return b"\x80\x04" + program + b"."


NAMES = {"m.Thing": RECORD, "m.twice": lambda value: [value, value], "m.word": "a word"}


@pytest.mark.parametrize(
    "program",
    [
        b"\x8c\x01m\x8c\x05Thing\x93)\x81}b}b",  # a state is assigned twice
        b"\x8c\x01m\x8c\x05Thing\x93K\x01\x85\x81",  # __new__ with an argument
        b"K\x01)\x81",  # an object of a number
        b"}K\x01b",  # a state of a mapping
        b"\x8c\x01m\x8c\x05Thing\x93)R",  # a class is called
        b"\x8c\x01m\x8c\x05other\x93",  # a name that is not listed
        b"}(K\x01K\x02\x86K\x03u",  # a key that is a tuple
        b"}K\x01K\x02\x86K\x03s",  # the same by SETITEM
        b"](K\x01K\x02u",  # items of a list
    ],
)
def test_a_program_that_builds_anything_but_records_is_rejected(program: bytes) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011
        read_records(pickled(program), NAMES)


def test_a_program_of_records_is_read() -> None:
    thing = read_records(pickled(b"\x8c\x01m\x8c\x05Thing\x93)\x81}\x8c\x01aK\x02sb"), NAMES)
    assert (thing.kind, thing.get("a"), thing.get("b")) == ("m.Thing", 2, None)
    empty = read_records(pickled(b"\x8c\x01m\x8c\x05Thing\x93)\x81"), NAMES)
    assert empty.state is None and empty.get("a") is None
    assert read_records(pickled(b"\x8c\x01m\x8c\x05twice\x93K\x07\x85R"), NAMES) == [7, 7]
    assert read_records(pickled(b"\x8c\x01m\x8c\x04word\x93"), NAMES) == "a word"
    key = read_records(pickled(b"}\x8c\x01m\x8c\x05Thing\x93)\x81K\x01s"), NAMES)
    assert list(key.values()) == [1]
