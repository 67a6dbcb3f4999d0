"""Checks of the weights of ``init_from`` that names and shapes do not show: config, scale of adapters, tied tensors."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import TextDict, ValueDict, Values
from automodel_ckpt.checkpoint.sources.source import MODEL, Tensors
from automodel_ckpt.checkpoint.state.mismatch import first_lines
from automodel_ckpt.checkpoint.state.model_config import CONFIG as _CONFIG
from automodel_ckpt.checkpoint.state.model_config import config_changes
from automodel_ckpt.checkpoint.state.module_tensors import unwrap
from automodel_ckpt.convert.formats.files import read_json
from automodel_ckpt.convert.merging.merge_rules import scale_of
from automodel_ckpt.convert.open import Weights
from automodel_ckpt.convert.targets.tensor_blocks import is_copy
from automodel_ckpt.errors import CheckpointUnusable, RecipeError

Stored = Mapping[str, tuple[Tensors, str]]
"""The tensors of sources: {name in the model: (module of a source, name there)}."""

_ADAPTER = "default"
_PREFIX = "base_model.model."
_TRAINED = f".modules_to_save.{_ADAPTER}."
_FACTOR = re.compile(r"(?P<layer>.+)\.lora_(?:A\.weight|embedding_A)")
# Shapes and values show the first two. Without the last, only keys that both have are compared: programs add their own.
_NOT_COMPARED = ("vocab_size", "tie_word_embeddings", "transformers_version")
_UNTIE = (
    "name the files in model.from_pretrained, which reads both; or let the model have both: model.config_overrides: "
    "{tie_word_embeddings: false}, and model.allow_missing for the one that from_pretrained does not have"
)
_UNTIE_ADAPTERS = "let the model have both: peft.ensure_weight_tying: false"
# What a GGUF file states of these is the name of its architecture.
_OF_THE_CLASS = ("model_type", "architectures")
_POSITIONS = "rope_parameters"
_DIRECTION = "is_causal"
_FLOAT32 = 2.0**-22


def side_directory(weights: Weights, module: Tensors) -> Path | None:
    """The directory of config.json or adapter_config.json of a *module* of *weights*, or None for a single file."""
    if weights.checkpoint is not None:
        # Tensors without elements are in no file.
        files = (tensor.slices[0].file for tensor in module.tensors.values() if tensor.slices)
        file = next(files, None)
        return None if file is None else (module.root / file).parent
    if not weights.path.is_dir():
        return None
    # A checkpoint of NeMo AutoModel has the model in a directory of it.
    inner = weights.path / MODEL
    names = (layout.ADAPTER_CONFIG, _CONFIG)
    return inner if any((inner / name).is_file() for name in names) else weights.path


@dataclass(frozen=True)
class Difference:
    """A difference that names and shapes do not show: *text* describes it, and *lines* list the values."""

    path: Path
    text: str
    lines: tuple[str, ...]


def other_configs(model: nn.Module, weights: Weights) -> Iterator[Difference]:
    """Yield how the config stored with *weights*, which fit *model*, describes a model that computes something else.

    Such a difference can be intended, as another base of rotary positions.
    """
    config = getattr(unwrap(model), "config", None)
    if not isinstance(config, PreTrainedConfig):
        return
    here = _complete(config)
    stated = dict(weights.stated_config)
    found: dict[str, Values] = {}
    if stated:
        found["metadata"] = _same_rounding(_as_in_class(config, stated), here)
    directory = side_directory(weights, weights.modules[MODEL])
    if directory is None and not stated:
        # What is beside a single file belongs to it, as for ckpt import, unless the file states its config itself.
        directory = weights.path.parent
    there = None
    # A damaged one is no reason not to start: the weights are complete without it.
    with contextlib.suppress(CheckpointUnusable):
        there = None if directory is None else _side_json(directory, _CONFIG)
    if there is not None:
        if there.get("model_type") == config.model_type:
            # The settings of another program may be invalid here, and are compared as they are.
            with contextlib.suppress(Exception):
                there = _complete(type(config).from_dict(there))
        # What transformers' masks do without the setting.
        there.setdefault(_DIRECTION, True)
        here.setdefault(_DIRECTION, True)
        found["config.json"] = there
    for where, settings in found.items():
        compared = {key: value for key, value in settings.items() if key not in _NOT_COMPARED}
        lines = config_changes(compared, here, there="there").function
        if lines:
            text = f"their {where} describes a model that computes something else"
            yield Difference(weights.path, text, lines)


def _as_in_class(config: PreTrainedConfig, stated: ValueDict) -> ValueDict:
    """Return the *stated* settings under the keys that *config* has, without those that are not stated.

    Other programs use other names for models: in GGUF, Mistral has the architecture ``llama`` too.
    """
    for key in _OF_THE_CLASS:
        stated.pop(key, None)
    with contextlib.suppress(Exception):
        complete = _complete(type(config).from_dict(dict(stated)))
        # Rotary positions have other keys in older versions of transformers.
        names = {_POSITIONS, *stated} if "rope_theta" in stated else set(stated)
        return {key: value for key, value in complete.items() if key in names}
    return stated


def _same_rounding(there: Values, here: Values) -> ValueDict:
    """Return *there* with the numbers of *here* that are equal in float32, which other formats store."""
    found: ValueDict = {}
    for key, value in there.items():
        own = here.get(key)
        found[key] = value
        if isinstance(value, Mapping) and isinstance(own, Mapping):
            found[key] = _same_rounding(value, own)
        elif isinstance(value, float) and isinstance(own, int | float):
            found[key] = own if math.isclose(value, own, rel_tol=_FLOAT32) else value
    return found


def _complete(config: PreTrainedConfig) -> ValueDict:
    """All settings of a config; config.json only has those that are not the default of its class."""
    settings: ValueDict = json.loads(config.to_json_string(use_diff=False))
    return settings


def _side_json(directory: Path, name: str) -> ValueDict | None:
    """The content of the JSON file *name* of the weights in *directory*, or next to shards.

    Returns None when there is no such file.
    """
    for place in (directory / layout.HF_METADATA, directory):
        # The files of the Hub's cache are links.
        path = Path(os.path.realpath(place / name))
        found = read_json(path.parent, path.name)
        if found is not None:
            return found
    return None


def check_scales(model: nn.Module, stored: Stored, directories: Mapping[int, Path | None]) -> None:
    """Raise :class:`RecipeError` if adapters were trained with another scale than the adapters of *model* have.

    The scale, alpha / r, is in no tensor but in ``adapter_config.json``. *directories* has the one with this file for
    each module of a source, by id. Without it, nothing is compared.
    """
    here = dict(_adapted_layers(unwrap(model)))
    configs: dict[int, Any] = {}
    lines = []
    for name, (module, _) in stored.items():
        match = _FACTOR.fullmatch(name.removeprefix(_PREFIX))
        if match is None or match["layer"] not in here:
            continue
        layer = match["layer"]
        if id(module) not in configs:
            directory = directories[id(module)]
            found = None if directory is None else _side_json(directory, layout.ADAPTER_CONFIG)
            configs[id(module)] = found
        rank, scale = here[layer]
        config, there = configs[id(module)], scale
        # A config that gives no scale is not compared.
        with contextlib.suppress(ValueError):
            there = scale if config is None else scale_of(config, rank, layer)
        if not math.isclose(there, scale):
            lines.append(f"{layer}: {there:g} there, {scale:g} here")
    if lines:
        raise RecipeError(
            "the adapters were trained with another scale than they have in this recipe",
            where="init_from.path",
            value=first_lines(lines),
            hint="the scale is alpha / r, or alpha / sqrt(r) with use_rslora: give the section peft the options r, "
            "alpha, alpha_pattern and use_rslora of their adapter_config.json",
        )


def shared_modules(model: nn.Module) -> TextDict:
    """{alias: name} of parameters shared by two modules that are trained in addition to adapters, as in peft's files.

    peft stores such a parameter under both names.
    """
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
        if _TRAINED not in name:
            continue
        stored = name.replace(_TRAINED, ".")
        if first.setdefault(id(parameter), stored) != stored:
            aliases[stored] = first[id(parameter)]
    return aliases


def check_tied(tied: Iterable[tuple[str, list[str]]], stored: Stored) -> None:
    """Raise :class:`RecipeError` if tensors that are one in the model have different values in the sources.

    *tied* are the tensors of the model of which the sources have several copies, with their names there. The copies
    are read.
    """
    lines = []
    hint = _UNTIE
    for name, (first, *others) in tied:
        module, fqn = stored[first]
        for other in others:
            copy, copy_fqn = stored[other]
            if not is_copy(copy.root, copy.tensors[copy_fqn], module.root, module.tensors[fqn]):
                lines.append(f"{other} and {first}")
                hint = _UNTIE_ADAPTERS if name.startswith(_PREFIX) else _UNTIE
    if lines:
        what = "tensors that are tied in this model have different values there"
        raise RecipeError(what, where="init_from.path", value=first_lines(lines), hint=hint)


def _adapted_layers(model: Any) -> Iterator[tuple[str, tuple[int, float]]]:
    """The names of the layers with adapters, as peft's patterns see them, with rank and scale."""
    for name, module in model.named_modules():
        scaling = getattr(module, "scaling", None)
        if isinstance(scaling, Mapping) and _ADAPTER in scaling:
            yield name.removeprefix(_PREFIX), (int(module.r[_ADAPTER]), float(scaling[_ADAPTER]))
