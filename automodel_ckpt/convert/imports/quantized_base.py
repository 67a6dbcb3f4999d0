"""A base whose files are quantized, for merging: its tensors as ordinary floats, computed when they are requested."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.sources.source import Tensors
from automodel_ckpt.checkpoint.tensors.float_cast import Array
from automodel_ckpt.convert.formats.files import read_json

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.state.quantized_tensors import QuantizedFiles

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class QuantizedBase:
    """The dequantized tensors of a base: *tensors* without data in files, and *parts*, the stored tensors they replace.

    Their dtype is the one that the base's config states, or bfloat16.
    """

    def __init__(self, source: Tensors, files: QuantizedFiles, dtype: str) -> None:
        self._source = source
        self._files = files
        self.parts = files.parts
        self.tensors: dict[str, Tensor] = {}
        for name, quantized in files.tensors.items():
            self.tensors[name] = Tensor(name, dtype, quantized.shape, ())

    def stored_name(self, name: str) -> str:
        """The stored tensor with the values of the tensor *name*."""
        return self._files.tensors[name].values

    def value(self, name: str) -> Array:
        """Return the values of the tensor *name*, rounded to its dtype, as float32.

        Raises :class:`CheckpointUnusable` for damaged files.
        """
        import torch

        from automodel_ckpt.checkpoint.formats.planning import DTYPES
        from automodel_ckpt.checkpoint.state.quantized_tensors import dequantized_rows

        quantized = self._files.tensors[name]
        # Rounded as the base is when an adapter is trained on it.
        values = torch.empty(quantized.shape, dtype=DTYPES[self.tensors[name].dtype], device="cpu")
        num_rows = quantized.shape[0]
        for start, block in dequantized_rows(self._source, quantized, 0, num_rows):
            values[start : start + len(block)] = block
        array: Array = values.float().numpy()
        return array


def quantized_base(
    directory: Path, root: Path, tensors: Mapping[str, Tensor]
) -> QuantizedBase | None:
    """Describe the quantized ones of the *tensors* of the base in *directory*, whose files are relative to *root*.

    Returns None if its config.json states no quantization, or one that is not supported here.
    """
    config: dict[str, Any] = read_json(directory, "config.json") or {}
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        return None
    # torch is imported only for a quantized base.
    from automodel_ckpt.checkpoint.state.quantized_tensors import (
        UnsupportedQuantization,
        find_quantized,
    )

    try:
        files = find_quantized(tensors, settings)
    except UnsupportedQuantization:
        return None
    stated = str(config.get("dtype") or config.get("torch_dtype"))
    # A copy: the caller replaces the quantized ones among its tensors.
    source = Tensors(root, dict(tensors))
    return QuantizedBase(source, files, _DTYPES.get(stated, "BF16"))
