"""The model before it is shared out: without memory where that can be, and how each rank then gets its part."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from transformers import GenerationConfig, PreTrainedConfig

from automodel_ckpt.checkpoint.starting import Filling, fill_module, module_shapes
from automodel_ckpt.checkpoint.trees import name_in_files, unwrap
from automodel_ckpt.checkpoint.weights import Tensors, open_weights
from automodel_ckpt.config.schema import ModelConfig
from automodel_ckpt.distributed.agree import gather_objects
from automodel_ckpt.distributed.parallelize import Materialise
from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.models.build import base_directory, build_model, fresh_dtype
from automodel_ckpt.models.keys import Names, compare
from automodel_ckpt.models.meta import InitialValues, allocate, initialise, is_transient, on_meta
from automodel_ckpt.models.names import names_in_files
from automodel_ckpt.recipes.starting import MODEL, together

log = logging.getLogger("automodel_ckpt")


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A model, on the meta device unless *materialise* is None: then it has its values, the same on all ranks."""

    model: nn.Module
    materialise: Materialise | None = None


class NotInParts(Exception):
    """Why a model has to be built whole on each rank."""


def draw_up(
    section: ModelConfig,
    config: PreTrainedConfig,
    *,
    auto_class: Any,
    seed: int,
    group: ProcessGroup | None,
    keeps_vocabulary: bool = True,
    needs_values: str = "",
    loading: Mapping[str, Any] | None = None,
) -> Blueprint:
    """The model that a recipe's *section* describes. Called on all ranks, which do alike.

    Built whole on each rank, with the reason in the log, where its values cannot be had in parts: files with other
    names than the model's tensors, a vocabulary that changes, *needs_values* (a reason), *loading* (further arguments
    of ``from_pretrained``). Raises :class:`RecipeError` as
    :func:`~automodel_ckpt.models.build.build_model`.
    """
    blueprint, reason = None, ""
    try:
        if not keeps_vocabulary and section.from_pretrained is not None:
            raise NotInParts("its vocabulary is to be resized")
        if needs_values or loading:
            raise NotInParts(needs_values or "its weights are changed while they are read")
        blueprint = _in_parts(section, config, auto_class, seed, group)
    except NotInParts as error:
        reason = str(error)
    reasons = gather_objects(group, reason)
    if blueprint is not None and not any(reasons):
        return blueprint
    if len(reasons) > 1:
        log.info("each rank builds the whole model first: %s", next(filter(None, reasons)))
    return Blueprint(_whole(section, config, auto_class, loading))


def _whole(
    section: ModelConfig, config: PreTrainedConfig, auto_class: Any, loading: Mapping[str, Any] | None
) -> nn.Module:
    return build_model(
        config,
        auto_class=auto_class,
        from_pretrained=section.from_pretrained,
        dtype=section.dtype,
        attn_implementation=section.attn_implementation,
        allow_missing=section.allow_missing,
        allow_unexpected=section.allow_unexpected,
        loading=loading,
    )


def _in_parts(
    section: ModelConfig, config: PreTrainedConfig, auto_class: Any, seed: int, group: ProcessGroup | None
) -> Blueprint:
    options: dict[str, Any] = {"dtype": fresh_dtype(config, section.dtype)}
    if section.attn_implementation is not None:
        options["attn_implementation"] = section.attn_implementation

    def build() -> Any:
        return on_meta(lambda: auto_class.from_config(copy.deepcopy(config), **options))

    try:
        model, values = build(), InitialValues(build(), seed)
        if not values.are_complete():
            raise NotInParts(f"{type(model).__name__} has values that only its constructor knows")
    except (ValueError, ImportError, RuntimeError, AttributeError, TypeError, KeyError, NotImplementedError) as error:
        raise NotInParts(f"it cannot be built without memory ({type(error).__name__}: {error})") from error
    source = None
    if section.from_pretrained is not None:
        source = _Source(section.from_pretrained, model, config, section.dtype)
    return Blueprint(model.train(), _materialiser(model, values, source, group))


def _materialiser(
    model: nn.Module, values: InitialValues, source: _Source | None, group: ProcessGroup | None
) -> Materialise:
    modules = dict(model.named_modules())
    transient = {
        name: {key for key in module._buffers if is_transient(module, key)} for name, module in modules.items()
    }

    def wanted(name: str, module: nn.Module) -> Callable[[str], bool]:
        return (lambda key: True) if source is None else transient[name].__contains__

    def materialise(shared: nn.Module, device: torch.device) -> None:
        allocate(shared, device)
        initialise(modules, values, wanted)
        if source is not None:
            together(group, lambda: source.fill(shared, modules))

    return materialise


class _Source:
    """The files of a pretrained model, whose tensors are those of *model* one to one: :class:`NotInParts` if not."""

    def __init__(self, name: str, model: Any, config: PreTrainedConfig, dtype: str) -> None:
        directory = base_directory(os.path.expanduser(name))
        if directory is None:
            raise NotInParts("its files are not on this machine yet")
        if getattr(config, "quantization_config", None) is not None:
            raise NotInParts("it is quantized")
        if dtype == "auto" and not isinstance(config.dtype, torch.dtype):
            raise NotInParts("its configuration does not say its dtype")
        if model.dtype != torch.float32 and (model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict):
            raise NotInParts("parts of it stay in float32")
        try:
            self._tensors: Tensors = open_weights(directory).modules[MODEL]
        except (CheckpointUnusable, OSError, KeyError) as error:
            raise NotInParts(f"its files cannot be read in parts ({error})") from error
        self._names = model.names_in_files = names_in_files(model, directory)
        self._matches = self._compared(model)
        if (directory / "generation_config.json").is_file() and model.can_generate():
            model.generation_config = GenerationConfig.from_pretrained(directory)

    def _compared(self, model: Any) -> Mapping[str, str]:
        shapes, tied = module_shapes(model)
        there = {fqn: tensor.shape for fqn, tensor in self._tensors.tensors.items()}
        if set(tied) & set(there) and set(tied.values()) & set(there):
            raise NotInParts("its files hold tied tensors twice")
        verdict = compare(Names(shapes, tied), Names(there), prefix=model.base_model_prefix)
        if different := verdict.lines(allowed=False):
            raise NotInParts(f"its files name other tensors ({different[0]}, {len(different)} in all)")
        return verdict.matches

    def fill(self, model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        """Read this rank's share. *modules* are those of the model as it was built, which may be inside others now."""
        model = unwrap(model)
        # Of a model with adapters a checkpoint is no more than those; the files are the base's.
        adapted: Any = getattr(model, "get_base_model", None)
        model = adapted() if adapted is not None else model
        now = {id(module): name for name, module in model.named_modules()}
        fqns, fillings = {stored: fqn for fqn, stored in self._names.items()}, {}
        for name, stored in self._matches.items():
            parent, _, key = fqns.get(name, name).rpartition(".")
            outer = now[id(modules[parent])]
            fqn = f"{outer}.{key}" if outer else key
            fillings[name_in_files(model, fqn)] = Filling(self._tensors, stored)
        fill_module(model, fillings, "init")
