"""The layers for multi-token prediction in the files of a base: their names, and reading them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.sources.source import Tensors
from automodel_ckpt.checkpoint.state.fill_modules import Filling, fill_module
from automodel_ckpt.checkpoint.state.module_tensors import StoredLayout
from automodel_ckpt.checkpoint.state.quantized_tensors import (
    QuantizedFiles,
    UnsupportedQuantization,
    find_quantized,
)
from automodel_ckpt.convert.open import open_base
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.loss.mtp import ATTRIBUTE, is_of_mtp, mtp_of
from automodel_ckpt.training.parts.init_from import MODEL


def mtp_names(layout: StoredLayout) -> set[str]:
    """The names in files of the layers' tensors; *layout* is that of the whole model."""
    names: set[str] = set()
    for fqn, name in layout.names.items():
        if is_of_mtp(fqn):
            names.add(name)
    for fqn, parts in layout.rows.items():
        if is_of_mtp(fqn):
            names.update(parts)
    return names


def check_mtp_complete(names: Collection[str], there: Collection[str], base: str) -> None:
    """Raise :class:`RecipeError` if *there*, the names in the files of *base*, lack some *names* of the layers."""
    missing = sorted(set(names) - set(there))
    if not missing:
        return
    found = f"{base} has none of {len(names)}"
    if len(missing) < len(names):
        found = f"{base} lacks {len(missing)} of {len(names)}"
    raise RecipeError(
        "the base has no weights of the layers for multi-token prediction",
        where="model.mtp.weights",
        value=f"{found}, such as {missing[0]}",
        hint="name a base with these layers, set weights: new for random initial values, or remove model.mtp",
    )


def fill_mtp(model: Any, directory: Path | None, layout: StoredLayout, base: str) -> None:
    """Read the layers of a complete *model* from the files of the *base* in *directory*, and dequantize them.

    *layout* is that of the model. Raises :class:`RecipeError` if the files lack them, or cannot be read in parts
    (*directory* None).
    """
    names = mtp_names(layout)
    if directory is None:
        check_mtp_complete(names, (), base)
    assert directory is not None
    tensors: Tensors = open_base(directory).modules[MODEL]
    check_mtp_complete(names, tensors.tensors, base)
    quantized = _quantized_in(directory, tensors)
    layers = mtp_of(model)
    assert layers is not None
    fillings: dict[str, Filling] = {}
    for name in names:
        fillings[name] = Filling(tensors, name, quantized=quantized.tensors.get(name))
    fill_module(layers, fillings, "mean", _layout_in_layers(layout))


def _quantized_in(directory: Path, tensors: Tensors) -> QuantizedFiles:
    """The quantized tensors of a base. Raises :class:`RecipeError` for a method that is not supported."""
    # Not the config of the model: transformers has removed the settings from it.
    config = json.loads((directory / "config.json").read_bytes())
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping):
        return QuantizedFiles({}, frozenset())
    try:
        return find_quantized(tensors.tensors, settings)
    except UnsupportedQuantization as error:
        raise RecipeError(
            "the layers for multi-token prediction are quantized in a way that is not supported",
            where="model.mtp",
            value=str(error),
            hint="name a base that is not quantized, or remove model.mtp",
        ) from error


def _layout_in_layers(layout: StoredLayout) -> StoredLayout:
    """The part of a model's *layout* that concerns the layers, with names relative to the module of the layers."""
    prefix = f"{ATTRIBUTE}."
    names: dict[str, str] = {}
    for fqn, name in layout.names.items():
        if is_of_mtp(fqn):
            names[fqn.removeprefix(prefix)] = name
    rows = {}
    for fqn, parts in layout.rows.items():
        if is_of_mtp(fqn):
            rows[fqn.removeprefix(prefix)] = parts
    return StoredLayout(names=names, rows=rows)
