"""The parameters of a transformers model by its config.json, built on the meta device: no weights are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from torch import nn

from automodel_ckpt.models.inspect.signature import empty_model

_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""The names that transformers' Trainer leaves out of weight decay (5.23, ``Trainer.get_decay_parameter_names``)."""

_HINT = "name the directory of the model's config.json with --config, or remove --training-state to import the weights"


class ListedParameter(NamedTuple):
    """A parameter: its name in memory, its shape, and whether transformers' Trainer applies weight decay to it."""

    name: str
    shape: tuple[int, ...]
    decays: bool


def list_parameters(directory: Path) -> list[ListedParameter]:
    """Return the parameters of the model in *directory* in the order of ``named_parameters()``, tied ones once.

    Raises :class:`CheckpointUnusable` if there is no config.json, or its class is not part of transformers.
    """
    model = empty_model(directory, hint=_HINT)
    model.tie_weights()
    return parameters_of(model)


def parameters_of(model: nn.Module) -> list[ListedParameter]:
    """Return the parameters of *model* that train, in the order of ``named_parameters()``, tied ones once."""
    without_decay: set[int] = set()
    for name, module in model.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            full_name = f"{name}.{own_name}".lower()
            if isinstance(module, nn.LayerNorm) or _WITHOUT_DECAY.search(full_name):
                without_decay.add(id(parameter))
    found: list[ListedParameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = id(parameter) not in without_decay
            found.append(ListedParameter(name, tuple(parameter.shape), decays))
    return found
