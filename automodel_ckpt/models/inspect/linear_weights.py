"""The weights of a model's linear layers under the names of its files, for exports that quantize them."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from automodel_ckpt.models.hf_names import names_in_files
from automodel_ckpt.models.inspect.signature import empty_model

_EXPERTS = 3
"""Dimensions of a tensor that has the weights of all experts of a layer: [experts, out, in]."""


def linear_weights(directory: Path) -> frozenset[str]:
    """Return the names, in files, of the weights of shape [out, in] of the text model's linear layers.

    Experts of a layer, which are one tensor in memory, count where files store each of them as a matrix. The output
    layer, the routers and other parts of a model, such as an image encoder, are not included. Builds the model in
    *directory* from its config.json without memory.

    Raises :class:`CheckpointUnusable` if its class is not part of transformers.
    """
    model = empty_model(
        directory, hint="export Hugging Face files (--to hf), and quantize them with other tools"
    )
    renamed, parts = names_in_files(model, directory)
    found: set[str] = set()
    prefix = _prefix_of(model, model.get_decoder())
    for module_name, module in model.named_modules():
        if not module_name.startswith(prefix):
            continue
        if isinstance(module, nn.Linear):
            name = f"{module_name}.weight"
            found.add(renamed.get(name, name))
            continue
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == _EXPERTS:
                found.update(parts.get(f"{module_name}.{parameter_name}", {}))
    return frozenset(found)


def _prefix_of(model: nn.Module, part: nn.Module) -> str:
    """Return the prefix of the names of the modules in *part*, a submodule of *model* or the model itself."""
    for name, module in model.named_modules():
        if module is part:
            return f"{name}." if name else ""
    raise AssertionError("get_decoder() of a transformers model returns one of its modules")
