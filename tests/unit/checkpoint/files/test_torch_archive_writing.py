"""Files of torch.save that are written without torch."""

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.checkpoint.files.dtypes import TORCH_NAMES
from automodel_ckpt.checkpoint.pickles.torch_archive_writing import (
    ArchiveTensor,
    write_torch_archive,
)


def written(path: Path, value: Any) -> Path:
    with path.open("wb") as file:
        write_torch_archive(file, value)
    return path


def described(code: str, tensor: torch.Tensor) -> ArchiveTensor:
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    # In blocks, as a large tensor is written.
    blocks = [content[start : start + 7] for start in range(0, len(content), 7)]
    return ArchiveTensor(code, tuple(tensor.shape), lambda: blocks)


@pytest.mark.parametrize("code", TORCH_NAMES)
def test_torch_reads_every_dtype_bit_equal(tmp_path: Path, code: str) -> None:
    dtype = getattr(torch, TORCH_NAMES[code])
    tensor = torch.tensor([[0.0, 1, 1], [1, 0, 2]]).to(dtype)
    path = written(tmp_path / "x.pt", {"x": described(code, tensor)})
    loaded = torch.load(path, weights_only=True)["x"]
    assert loaded.dtype == dtype
    assert loaded.shape == tensor.shape
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (0, 3), (1, 1), (2, 3, 5)])
def test_torch_reads_every_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape)
    path = written(tmp_path / "x.pt", {"x": described("F32", tensor)})
    assert torch.equal(torch.load(path, weights_only=True)["x"], tensor)


def test_plain_values_keep_their_types(tmp_path: Path) -> None:
    value = {
        "list": [1, -1, 2**31, -(2**63), 2**200, 2.5, True, False, None, "é\n"],
        "tuple": ((), (1, (2,))),
        "empty": [{}, []],
        0: {f"name {number}": number for number in range(2500)},
    }
    loaded = torch.load(written(tmp_path / "x.pt", value), weights_only=True)
    assert loaded == value
    assert [type(item) for item in loaded["list"]] == [type(item) for item in value["list"]]


def test_other_programs_find_the_checksums_of_all_records(tmp_path: Path) -> None:
    path = written(tmp_path / "x.pt", {"x": described("F32", torch.rand(100))})
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
