"""What the files of a model do not contain: its tensors' names in memory, which are tied or transposed, and its layers.

Found by building the model that its config.json describes on the meta device: no weights are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from automodel_ckpt.checkpoint.files.type_aliases import Shape, TextDict, Texts
from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.models.hf_names import (
    Conversion,
    RowPart,
    names_in_files,
    read_conversion,
    tensor_names_in,
)
from automodel_ckpt.models.task_head import is_of_backbone

_TRANSPOSED = (Conv1D, nn.Embedding)
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers with weights of three or more dimensions that are no experts."""
_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""The names that transformers' Trainer leaves out of weight decay (5.23, ``Trainer.get_decay_parameter_names``)."""
_WITH_CONFIG = (
    "name the directory of the model's config.json with --config, or remove --training-state to import the "
    "weights"
)
_EXPERTS = 3
"""Dimensions of a tensor that has the weights of all experts of a layer: [experts, out, in]."""


class FusedExperts(NamedTuple):
    """A parameter with the weights of all experts of a layer.

    *name* is that in memory. *parts* maps the names in files to (expert, slices of its dimensions); it is empty if the
    files have the parameter as one tensor.
    """

    name: str
    num_experts: int
    parts: Mapping[str, RowPart]


class ModelSignature(NamedTuple):
    """The names of a transformers model's tensors.

    *files* maps each name in memory to the name in the files, and *tied* each alias of a tensor to its first name (both
    in memory). The weights of the modules *transposed* have one row per input: shape [in, out]. *experts* has the fused
    experts by the name of their module. *others* are the tensors in the files that the model does not have. *exported*
    has the name in an export of those tensors that the files store without the prefix of the backbone, or with it in
    excess, if other tensors of the model (a new head) cannot have such a name.
    """

    files: Texts
    tied: Texts
    transposed: frozenset[str]
    experts: Mapping[str, tuple[FusedExperts, ...]]
    others: frozenset[str] = frozenset()
    exported: Texts = MappingProxyType({})


def read_signature(directory: Path, config: Path | None = None) -> ModelSignature:
    """Build the transformers model in *directory* without memory, and read its signature from it.

    *config* is the file with its configuration; None: config.json in the directory. Raises :class:`CheckpointUnusable`
    if its class is not part of transformers.
    """
    hint = "load the base and the adapter with peft in your own code, and call merge_and_unload"
    model = empty_model(config or directory, hint=hint)
    conversion = read_conversion(model)
    renamed, parts = names_in_files(model, directory, conversion)
    stored = tensor_names_in(directory)
    prefix = model.base_model_prefix
    files: TextDict = {}
    written = [name for of_rows in parts.values() for name in of_rows]
    for name in model.state_dict(keep_vars=True):
        written.append(renamed.get(name, name))
        files[name] = _spelling_in_files(written[-1], prefix, stored)
    spellings = {_spelling_in_files(name, prefix, stored): name for name in written}
    exported = {in_base: name for in_base, name in spellings.items() if in_base != name}
    if conversion is None:
        exported = {}
    transposed: set[str] = set()
    experts: dict[str, tuple[FusedExperts, ...]] = {}
    for name, module in model.named_modules():
        # peft reads this attribute of modules with fused experts.
        if isinstance(module, _TRANSPOSED) or getattr(module, "is_transposed", False):
            transposed.add(name)
        fused = tuple(_fused_experts(name, module, parts))
        if fused:
            experts[name] = fused
    tied = dict(model.all_tied_weights_keys)
    others = _not_of(model, conversion, stored - set(files.values()))
    return ModelSignature(files, tied, frozenset(transposed), experts, others, exported)


def _not_of(
    model: PreTrainedModel, conversion: Conversion | None, stored: set[str]
) -> frozenset[str]:
    """The names in *stored*, all in files, that no tensor of *model* has in files."""
    if conversion is None:
        # How files name the tensors of the backbone is unknown.
        return frozenset(name for name in stored if not is_of_backbone(model, name))
    prefix = model.base_model_prefix
    known = {_spelling_in_files(name, prefix, stored) for name in conversion.in_files}
    return frozenset(stored - known)


def _fused_experts(
    module_name: str, module: nn.Module, parts: Mapping[str, Mapping[str, RowPart]]
) -> Iterator[FusedExperts]:
    """Yield the direct parameters of *module* with three dimensions, in their order in the module.

    peft wraps the module once for each of them, in this order.
    """
    if isinstance(module, _LAYERS):
        return
    for own_name, parameter in module.named_parameters(recurse=False):
        if parameter.dim() == 3:
            name = f"{module_name}.{own_name}"
            yield FusedExperts(name, parameter.shape[0], parts.get(name, {}))


def empty_model(path: Path, *, hint: str) -> Any:
    """Build the transformers model that a config describes, on the meta device.

    *path* is the file of the config, or the directory with config.json.

    Raises :class:`CheckpointUnusable` with *hint* if it does not exist, or its class is not part of transformers.
    """
    # transformers would report that the model is unrecognized.
    if path.is_dir() and not (path / "config.json").is_file():
        raise CheckpointUnusable(
            "there is no config.json", where=str(path), value="no such file", hint=hint
        )
    try:
        return model_of(transformers.AutoConfig.from_pretrained(path, trust_remote_code=False))
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointUnusable(
            "this is not a model of the transformers library",
            where=str(path / "config.json" if path.is_dir() else path),
            value=str(error).strip()[:300],
            hint=hint,
        ) from error


def model_of(config: transformers.PreTrainedConfig) -> Any:
    """Build the transformers model that *config* describes, on the meta device.

    Raises ValueError or AttributeError if its class is not part of transformers.
    """
    found = model_class(config)
    with torch.device("meta"):
        return found(config)


def model_class(config: transformers.PreTrainedConfig) -> Any:
    """Return the class of transformers that *config* names.

    Raises ValueError or AttributeError if there is none.
    """
    if config.architectures:
        name = config.architectures[0]
    else:
        # Files of Qwen2-VL and Qwen2.5-VL of 2025 can have it in the config of the text model.
        names = [
            each
            for each in config.get_text_config().architectures or ()
            if getattr(getattr(transformers, each, None), "config_class", None) is type(config)
        ]
        if not names:
            raise ValueError("config.json does not state the class of the model (architectures)")
        name = names[0]
    found = getattr(transformers, name)
    # The file may name any attribute of transformers, also a function.
    if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
        raise ValueError(f"{name} is not a model")
    return found


def _spelling_in_files(name: str, prefix: str, stored: set[str]) -> str:
    """The name as the files spell it: without or with the *prefix* of the inner model (base_model_prefix)."""
    for candidate in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"):
        if candidate in stored:
            return candidate
    return name


ListedParameter = tuple[str, Shape, bool]
"""A parameter: its name in memory, its shape, and whether transformers' Trainer applies weight decay to it."""


def list_parameters(directory: Path) -> list[ListedParameter]:
    """Return the parameters of the model in *directory* in the order of ``named_parameters()``, tied ones once.

    Raises :class:`CheckpointUnusable` if there is no config.json, or its class is not part of transformers.
    """
    model = empty_model(directory, hint=_WITH_CONFIG)
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
    return [
        (name, tuple(parameter.shape), id(parameter) not in without_decay)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


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
    decoder = model.get_decoder()
    [inside] = [name for name, module in model.named_modules() if module is decoder]
    prefix = f"{inside}." if inside else ""
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
