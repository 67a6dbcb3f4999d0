"""The dtypes of the safetensors format by their codes: their width, and what torch calls them. Imports no torch."""

from __future__ import annotations

# Bits per element of every dtype code of the safetensors format (source: safetensors 0.8, `Dtype`).
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "C128": 128,
}
TORCH_NAMES: dict[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "C128": "complex128",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
ORDINARY_FLOATS = frozenset({"BF16", "F16", "F32", "F64"})
CODES = {name: code for code, name in TORCH_NAMES.items()}
"""The codes by torch's names."""
_ALIASES = {"double": "F64", "float": "F32", "half": "F16"}


def dtype_code(name: str) -> str:
    """The code of a dtype's name, itself a code or torch's (``torch.bfloat16``); others pass through."""
    return name if name in DTYPE_BITS else (CODES | _ALIASES).get(name.removeprefix("torch."), name)
