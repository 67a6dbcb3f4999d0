"""The tensors of a model that another program saved, read through their description."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from automodel_ckpt.checkpoint.files.dtypes import TORCH_NAMES
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.tensors.box_reader import whole
from automodel_ckpt.convert.formats.format import ModelParameter, OptimizerState
from automodel_ckpt.convert.formats.registry import detect, detect_run
from automodel_ckpt.convert.open import open_source, open_weights
from automodel_ckpt.errors import CheckpointUnusable


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


def error_of(path: Path) -> str:
    with pytest.raises(CheckpointUnusable) as raised:
        open_weights(path)
    return str(raised.value)


def described(path: Path) -> Any:
    """Return what is known of the weights in *path* without reading them: names, ties, notes, and what is left out."""
    return open_source(path)


def kind_of(path: Path) -> str:
    known = detect(path)
    assert known is not None
    return known.name


def training_state_of(path: Path, model: nn.Module | None = None) -> Any:
    """Return the training state in a checkpoint. Without a *model*, its files must name the parameters."""
    known = detect_run(path)
    assert known is not None
    state = known.training_state(path, (lambda: parameters_of(model)) if model else no_parameters)
    assert state is not None
    return state


def parameters_of(model: nn.Module) -> list[ModelParameter]:
    """Return the parameters of a model as formats that number them need them."""
    return [
        ModelParameter(name, tuple(parameter.shape), parameter.dim() >= 2)
        for name, parameter in model.named_parameters()
    ]


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
