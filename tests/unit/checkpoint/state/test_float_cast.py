"""Casts agree with torch's, bit for bit: on every 16-bit value, and on singles and doubles of every size."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from automodel_ckpt.checkpoint.tensors.float_cast import cast, storage_dtype

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
BITS = {"BF16": 16, "F16": 16, "F32": 32, "F64": 64}
SIGNED: dict[int, Any] = {16: np.int16, 32: np.int32, 64: np.int64}


def values(dtype: str) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(0)
    if BITS[dtype] == 16:
        return np.arange(65536, dtype=np.uint16)
    anything = random.integers(0, 2 ** BITS[dtype], 200_000, dtype=f"u{BITS[dtype] // 8}")
    sizes = random.normal(size=200_000) * 10.0 ** random.integers(-12, 8, 200_000)
    halfway = (
        1 + 2.0**-11 + 2.0**-30 * np.arange(-3, 4)
        if dtype == "F64"
        else 1 + 2.0**-11 * np.arange(8)
    )
    floats = np.concatenate([sizes, halfway]).astype(f"f{BITS[dtype] // 8}")
    return np.concatenate([anything, floats.view(anything.dtype)])


def as_torch(bits: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    return torch.from_numpy(bits.view(SIGNED[BITS[dtype]]).copy()).view(DTYPES[dtype])


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(DTYPES, 2)))
def test_a_cast_is_torchs(source: str, target: str) -> None:
    bits = values(source)
    want = as_torch(bits, source).to(DTYPES[target])
    found = as_torch(cast(bits.view(storage_dtype(source, BITS[source])), source, target), target)
    number = ~want.isnan()
    assert torch.equal(found.isnan(), want.isnan())
    integers = {16: torch.int16, 32: torch.int32, 64: torch.int64}[BITS[target]]
    assert torch.equal(found[number].view(integers), want[number].view(integers))
