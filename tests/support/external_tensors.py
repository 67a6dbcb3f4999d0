"""The tensors of a model that another program saved, read through their description."""

from __future__ import annotations

from pathlib import Path

import torch

from automodel_ckpt.checkpoint.files.dtypes import TORCH_NAMES
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.tensors.stored import whole
from automodel_ckpt.convert.formats.format import ModelParameter, OptimizerState
from automodel_ckpt.convert.open import open_weights


def values(path: Path, config: Path | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors that the description of *path* leads to, read from the files, with their tied names.

    *config* is the directory of the config.json to whose names they are converted.
    """
    module = open_weights(path, config).modules["model"]
    found = {}
    for name, tensor in module.tensors.items():
        found[name] = value_of(module.root, tensor)
    for name, stored in module.tied.items():
        found[name] = found[stored]
    return found


def value_of(root: Path, tensor: Tensor) -> torch.Tensor:
    """Return a described tensor, read from the files below *root*."""
    content = bytearray(whole(root, tensor).tobytes())
    dtype = getattr(torch, TORCH_NAMES[tensor.dtype])
    flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return flat.reshape(tensor.shape)


def moments(state: OptimizerState) -> dict[str, torch.Tensor]:
    """Return the tensors of an optimizer's state by ``NAME:ENTRY``, read from the files."""
    found = {}
    for name, entries in state.tensors.items():
        for entry, tensor in entries.items():
            found[f"{name}:{entry}"] = value_of(state.root, tensor)
    return found


def no_parameters() -> list[ModelParameter]:
    """Stands for the model's parameters, where the files name them: building the model would be a mistake."""
    raise AssertionError("the model was built although the files name the parameters")
