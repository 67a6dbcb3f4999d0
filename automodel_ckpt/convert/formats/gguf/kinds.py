"""The types of tensors in GGUF files: their numbers, and the bytes of a block.

Sources: ``enum ggml_type`` of ggml, and ``enum llama_ftype`` of llama.cpp for the type of a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of tensor: its *number* in files, and *block_bytes* for each *block_size* elements of a row.

    *dtype* is the safetensors dtype of the same bytes; None for quantized tensors. *file_type* is the number of a file
    that mostly has tensors of this type; None for types that this program does not write.
    """

    name: str
    number: int
    block_size: int
    block_bytes: int
    dtype: str | None = None
    file_type: int | None = None

    @property
    def is_quantized(self) -> bool:
        return self.dtype is None


F32 = Kind("F32", 0, 1, 4, "F32", 0)
F16 = Kind("F16", 1, 1, 2, "F16", 1)
BF16 = Kind("BF16", 30, 1, 2, "BF16", 32)
Q8_0 = Kind("Q8_0", 8, 32, 34, None, 7)
_KINDS = (
    F32,
    F16,
    BF16,
    Kind("F64", 28, 1, 8, "F64"),
    Q8_0,
    Kind("Q4_0", 2, 32, 18, None, 2),
    Kind("Q4_1", 3, 32, 20, None, 3),
    Kind("Q5_0", 6, 32, 22, None, 8),
    Kind("Q5_1", 7, 32, 24, None, 9),
    # Read only: the library gguf dequantizes them, and does not quantize them.
    Kind("Q2_K", 10, 256, 84),
    Kind("Q3_K", 11, 256, 110),
    Kind("Q4_K", 12, 256, 144),
    Kind("Q5_K", 13, 256, 176),
    Kind("Q6_K", 14, 256, 210),
    Kind("IQ4_NL", 20, 32, 18),
    Kind("IQ4_XS", 23, 256, 136),
)
BY_NUMBER: Mapping[int, Kind] = {kind.number: kind for kind in _KINDS}
"""The types that are read, by their number in files."""
WRITABLE: Mapping[str, Kind] = {kind.name: kind for kind in _KINDS if kind.file_type is not None}
"""The types that ``ckpt export --to gguf --type`` accepts, by name."""
QUANTIZATION_VERSION = 2
"""The version of the block layouts, ``general.quantization_version`` (``GGML_QNT_VERSION`` of ggml)."""
