"""Training with matrix products in FP8, through torchao: linear layers scale and cast their inputs and weights.

The parameters keep their dtype, names and shapes, so optimizers, sharding and checkpoints are the same as in other
runs.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from automodel_ckpt.base.units import counted
from automodel_ckpt.errors import RecipeError

log = logging.getLogger("automodel_ckpt")

MULTIPLE = 16
"""FP8 products need sizes that it divides; the number of tokens is one in the product for a weight's gradient."""
_FIRST_CAPABILITY = (8, 9)
"""The first compute capability of CUDA with products in FP8."""
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Names of layers that choose experts. They are small, and rounding would change the choice."""


def convert_to_fp8(
    model: nn.Module, *, recipe: str, exclude: Sequence[str], emulate: bool, device: torch.device
) -> None:
    """Let the linear layers of the decoder of *model* compute in FP8; not the output layer, which is outside of it.

    *recipe* is a name of torchao's recipes, *exclude* are globs of names of layers. *emulate* computes the rounded
    values in higher precision, on any device. Layers with widths that are no multiples of 16 stay.

    Raises :class:`RecipeError` for a device without FP8, without torchao, or if there is no layer to convert.
    """
    require_fp8(device, emulate=emulate)
    selected, num_odd = fp8_layers(model, exclude)
    if not selected:
        raise _error(
            "no linear layer of this model can compute in FP8",
            f"{counted(num_odd, 'layer')} with a width that is no multiple of {MULTIPLE}",
            "remove the section fp8, or patterns of fp8.exclude",
        )
    from torchao import float8

    config: Any = float8.Float8LinearConfig.from_recipe_name(recipe)
    # Rows have any number of tokens. It has no effect where MULTIPLE divides it.
    config = replace(config, emulate=emulate, pad_inner_dim=True)
    for name in selected:
        _change_class(model.get_submodule(name), config)
    others = f"; {num_odd} with other widths do not" if num_odd else ""
    log.info("FP8: %d linear layers compute with the recipe %s%s", len(selected), recipe, others)


def _change_class(layer: nn.Module, config: Any) -> None:
    """Make *layer* a linear layer of torchao, which stays the same object: initial values and sharding refer to it."""
    from torchao import float8

    holder = nn.Sequential(layer)
    float8.convert_to_float8_training(holder, config=config)
    converted = holder[0]
    for name, value in vars(converted).items():
        if name not in vars(layer):
            object.__setattr__(layer, name, value)
    layer.__class__ = type(converted)


def require_fp8(device: torch.device, *, emulate: bool) -> None:
    """Raise :class:`RecipeError` for a device without FP8 unless *emulate* is set, and without torchao."""
    capability = None
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    check_device(device.type, capability, emulate=emulate)
    if importlib.util.find_spec("torchao") is None:
        raise _error("torchao is not installed", None, "pip install 'automodel_ckpt[fp8]'")


def check_device(device_type: str, capability: tuple[int, int] | None, *, emulate: bool) -> None:
    """Validate that a device computes products in FP8. *capability* is CUDA's compute capability, None elsewhere.

    Raises :class:`RecipeError` otherwise, unless *emulate* is set.
    """
    if emulate or (capability is not None and capability >= _FIRST_CAPABILITY):
        return
    found = device_type
    if capability is not None:
        found = f"compute capability {capability[0]}.{capability[1]}"
    hint = "remove the section fp8, or set fp8.emulate true (slow, for tests)"
    raise _error("FP8 needs a CUDA device with compute capability 8.9 or higher", found, hint)


def fp8_layers(model: nn.Module, exclude: Sequence[str]) -> tuple[list[str], int]:
    """The names of the linear layers to convert, and the number of layers with widths that do not allow it."""
    base: Any = model
    inside = {id(module) for module in base.get_decoder().modules()}
    selected: list[str] = []
    num_odd = 0
    for name, module in model.named_modules():
        if id(module) not in inside or type(module) is not nn.Linear:
            continue
        is_router = name.rpartition(".")[2] in _ROUTERS
        if is_router or any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude):
            continue
        if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
            num_odd += 1
            continue
        selected.append(name)
    return selected, num_odd


def _error(what: str, value: object, hint: str) -> RecipeError:
    return RecipeError(what, where="fp8", value=value, hint=hint)
