"""The reader of plain data gives back all that state may hold, as torch.save wrote it."""

import io
import zipfile
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch

from automodel_ckpt.checkpoint.pickles import pickle_reader
from automodel_ckpt.errors import CheckpointUnusable
from tests.hostile.harness.bombs import pickled, storage_beyond_its_record


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


VALUES: list[Any] = [
    None,
    True,
    2**70,
    -3,
    1.5,
    1j,
    "é",
    b"",
    b"ab\xff",
    bytearray(),
    bytearray(b"ab"),
    torch.Size([1, 2]),
    torch.float32,
    torch.float8_e8m0fnu,
    torch.device("cpu"),
    torch.strided,
    {1, 2},
    set(),
    Counter("aab"),
    Counter(),
    OrderedDict(a=1),
    {(1, (2,)): 3},
    [1, [2, (3,)]],
    {index: index for index in range(3000)},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    read = pickle_reader.load(saved(value), "here")
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3.0),
        torch.ones(2, dtype=torch.uint16),
        torch.ones(2, dtype=torch.float8_e4m3fn),
        torch.empty(0, 3),
        torch.tensor(True),
        torch.ones(3, 2).t(),
        torch.ones(1).expand(5),
        torch.arange(9)[2:5],
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_a_tensor_comes_back_as_it_was(tensor: torch.Tensor) -> None:
    read = pickle_reader.load(saved({"value": tensor}), "here")["value"]
    assert (read.dtype, read.shape, read.stride(), type(read)) == (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        type(tensor),
    )
    assert torch.equal(read.float(), tensor.float()) and read.requires_grad == tensor.requires_grad


def test_a_modules_state_dict_keeps_its_metadata() -> None:
    state = torch.nn.Linear(2, 1).state_dict()
    read = pickle_reader.load(saved(state), "here")
    assert list(read) == list(state) and vars(read) == vars(state)


@pytest.mark.parametrize(
    "value",
    [pickle_reader.Fault, print, torch.nn.Linear(1, 1)],
    ids=["class", "function", "module"],
)
def test_code_does_not_come_back(value: Any) -> None:
    with pytest.raises(CheckpointUnusable, match=r"it asks for|never writes"):
        pickle_reader.load(saved(value), "here")


def test_data_that_is_cut_or_extended_is_refused() -> None:
    data = saved({"value": torch.ones(3)})
    for other in (data[:-1], data + b"x", data[1:], data[: len(data) // 2], b""):
        with pytest.raises(CheckpointUnusable):
            pickle_reader.load(other, "here")


@pytest.mark.parametrize(
    "program",
    [
        b"c_codecs\nencode\n]R",  # a call whose arguments are a list
        b"ctorch\nfloat32\n)R",  # a call of what is no function
        b"ctorch.storage\nUntypedStorage\n)R",  # a call of a class that only names a storage
        b"}}b",  # attributes of a dict
        b"ccollections\nOrderedDict\n)R]b",  # attributes that are a list
    ],
)
def test_calls_and_attributes_that_torch_save_never_writes_are_rejected(program: bytes) -> None:
    with pytest.raises(CheckpointUnusable, match="its pickle has an instruction"):
        pickle_reader.load(pickled(program), "here")


def nested(levels: int) -> Any:
    value: Any = ()
    for _ in range(levels - 1):
        value = (value,)
    return value


def test_tuples_may_be_nested_30_levels_deep() -> None:
    deepest = nested(pickle_reader.MAX_TUPLES)
    assert pickle_reader.load(saved({deepest: 1}), "here") == {deepest: 1}
    with pytest.raises(CheckpointUnusable, match="nested more than 30 levels"):
        pickle_reader.load(saved({nested(pickle_reader.MAX_TUPLES + 1): 1}), "here")


def test_containers_may_be_nested_200_levels_deep() -> None:
    def listed(levels: int) -> list[Any]:
        value: list[Any] = []
        for _ in range(levels):
            value = [value]
        return value

    deepest = listed(pickle_reader.MAX_DEPTH)
    assert pickle_reader.load(saved(deepest), "here") == deepest
    with pytest.raises(CheckpointUnusable, match="contain each other"):
        pickle_reader.load(saved(listed(pickle_reader.MAX_DEPTH + 1)), "here")
    mapping: dict[str, Any] = {}
    for _ in range(pickle_reader.MAX_DEPTH + 1):
        mapping = {"inner": mapping}
    with pytest.raises(CheckpointUnusable, match="contain each other"):
        pickle_reader.load(saved(mapping), "here")


def test_values_that_repeat_each_other_exponentially_are_rejected_though_not_deep() -> None:
    value: list[Any] = [0] * 10
    for _ in range(8):
        value = [value] * 10
    with pytest.raises(CheckpointUnusable, match="contain each other"):
        pickle_reader.load(saved(value), "here")


def test_a_tensor_may_repeat_its_elements_up_to_64_mib() -> None:
    num_elements = pickle_reader._FREE_BYTES // 4
    read = pickle_reader.load(saved(torch.zeros(1).expand(num_elements)), "here")
    assert read.shape == (num_elements,)
    with pytest.raises(CheckpointUnusable, match="in too few bytes"):
        pickle_reader.load(saved(torch.zeros(1).expand(num_elements + 1)), "here")


def test_tensors_that_share_a_storage_share_it_again() -> None:
    whole = torch.arange(6.0)
    first, second = pickle_reader.load(saved([whole[:4], whole[2:]]), "here")
    first[3] = 7
    assert second.tolist() == [2, 7, 4, 5]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00utf-8\x86R",
            "encodes text as 'utf-8'",
        ),
        (b"cbuiltins\nset\nK\x05\x85R", "builds something of a int"),
        (b"cbuiltins\nbytearray\nK\x05\x85R", "builds something of a int"),
        (b"ccollections\nCounter\n]\x85R", "builds something of a list"),
        (
            b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch\nTensor\nctorch\nTensor\n)}tR",
            "builds a tensor in an unknown way",
        ),
    ],
)
def test_values_that_torch_save_never_builds_are_rejected_by_name(
    program: bytes, message: str
) -> None:
    with pytest.raises(CheckpointUnusable, match=message):
        pickle_reader.load(pickled(program), "here")


def test_a_storage_with_another_size_than_its_record_is_rejected() -> None:
    with pytest.raises(CheckpointUnusable, match="storage of 1000000 elements has 4 bytes"):
        pickle_reader.load(storage_beyond_its_record(), "here")


def test_a_compressed_archive_is_rejected_before_anything_is_unpacked() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"\x80\x02}." + bytes(1000))
    with pytest.raises(CheckpointUnusable, match="records are compressed"):
        pickle_reader.load(buffer.getvalue(), "here")
