"""The tensors of a model that another program saved, read through their description."""

from __future__ import annotations

from pathlib import Path

import torch

from automodel_ckpt.checkpoint.dtypes import TORCH_NAMES
from automodel_ckpt.checkpoint.tensors.stored import whole
from automodel_ckpt.convert.open import open_weights


def values(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that the description of *path* leads to, read from the files, with their tied names."""
    module = open_weights(path).modules["model"]
    found = {}
    for name, tensor in module.tensors.items():
        content = bytearray(whole(module.root, tensor).tobytes())
        dtype = getattr(torch, TORCH_NAMES[tensor.dtype])
        flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        found[name] = flat.reshape(tensor.shape)
    for name, stored in module.tied.items():
        found[name] = found[stored]
    return found
