"""Float32 weights that are stored in two tensors: bfloat16 values, and the further bits in the state of an optimizer.

See ``optim/adam8bit.py``, which divides them. Imports no torch, and numpy only to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_ckpt.checkpoint.files.layout import FURTHER_BITS
from automodel_ckpt.checkpoint.parts.slices import Box, Tensor
from automodel_ckpt.checkpoint.tensors.box_reader import BoxReader

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.tensors.float_cast import Array

_SUFFIX = f".{FURTHER_BITS}"


def further_bits_of(
    trees: Mapping[str, Mapping[str, Tensor]],
) -> dict[str, dict[str, tuple[str, str]]]:
    """Find the further bits of weights among the tensors of a checkpoint, which *trees* maps by tree and name.

    Returns, for each tree with such weights, the name of each weight with the tree and the name of its further bits.
    """
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for owner, tensors in trees.items():
        prefix = f"{owner}.state."
        for name, bits in tensors.items():
            if not (name.startswith(prefix) and name.endswith(_SUFFIX)):
                continue
            parameter = name.removeprefix(prefix).removesuffix(_SUFFIX)
            for module, weights in trees.items():
                # Optimizers name a parameter by its module, in which dots are replaced, and its name there.
                fqn = parameter.removeprefix(f"{module.replace('.', '%')}.")
                weight = weights.get(fqn) if fqn != parameter else None
                if weight is not None and _continues(weight, bits):
                    found.setdefault(module, {})[fqn] = (owner, name)
    return found


def _continues(weight: Tensor, bits: Tensor) -> bool:
    return (weight.dtype, bits.dtype) == ("BF16", "I16") and weight.shape == bits.shape


class Float32Reader:
    """Reads boxes of float32 weights as raw bits, as :class:`BoxReader` does. Files are relative to *root*."""

    def __init__(self, root: Path, rounded: Tensor, further_bits: Tensor) -> None:
        self._rounded = BoxReader(root, rounded)
        self._further_bits = BoxReader(root, further_bits)

    def read(self, box: Box) -> Array:
        """Return the values in *box* as unsigned integers of 32 bits."""
        import numpy as np

        high = self._rounded.read(box).astype(np.int32) << 16
        bits = self._further_bits.read(box).view(np.int16).astype(np.int32)
        # As in training: a weight of 0 has no negative bits.
        bits = np.where(high << 1 == 0, np.maximum(bits, 0), bits)
        return (high + bits).view(np.uint32)

    def wide(self, raw: Array) -> Array:
        """Convert raw bits to double precision."""
        import numpy as np

        return raw.view(np.float32).astype(np.float64)
