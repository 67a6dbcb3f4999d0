"""The model before it is shared out: without memory where that can be, and how each rank then gets its part."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from transformers import GenerationConfig, PreTrainedConfig

from automodel_ckpt.checkpoint.module_tensors import name_in_files, unwrap
from automodel_ckpt.checkpoint.sources.source import Tensors
from automodel_ckpt.checkpoint.state.fill_modules import Filling, fill_module, module_shapes
from automodel_ckpt.config.schema import ModelConfig
from automodel_ckpt.convert.open import open_weights
from automodel_ckpt.distributed.agree import gather_objects, raise_on_all_ranks
from automodel_ckpt.distributed.parallelize import Materialise
from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.models.build import build_model, fetched_directory, fresh_dtype
from automodel_ckpt.models.hf_names import InFiles, names_in_files
from automodel_ckpt.models.meta_init import (
    InitialValues,
    allocate,
    initialise,
    is_transient,
    on_meta,
)
from automodel_ckpt.models.vocabulary import log_resized, set_size, vocabulary_names
from automodel_ckpt.models.weight_matching import Names, Verdict, compare
from automodel_ckpt.recipes.init_from import MODEL

log = logging.getLogger("automodel_ckpt")

_CANNOT_BUILD = (
    ValueError,
    ImportError,
    RuntimeError,
    AttributeError,
    TypeError,
    KeyError,
    NotImplementedError,
    AssertionError,
)
"""What transformers' and torch's constructors raise; AssertionError: a padding token beyond a smaller vocabulary."""


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
    vocab_size: int | None = None,
    needs_values: str = "",
    loading: Mapping[str, Any] | None = None,
) -> Blueprint:
    """The model that a recipe's *section* describes. Called on all ranks, which do alike.

    A model of files gets room for *vocab_size* tokens, None: for as many as it has. Built whole on each rank, with the
    reason in the log, and then with the size it has, where its values cannot be had in parts: files with other names
    than the model's tensors, *needs_values* (a reason), *loading* (further arguments of ``from_pretrained``). Raises
    :class:`RecipeError` as :func:`~automodel_ckpt.models.build.build_model`.
    """
    blueprint, reason = None, ""
    try:
        if needs_values or loading:
            raise NotInParts(needs_values or "its weights are changed while they are read")
        blueprint = _in_parts(section, _resized(config, vocab_size), auto_class, seed, group)
    except NotInParts as error:
        reason = str(error)
    reasons = gather_objects(group, reason)
    if blueprint is not None and not any(reasons):
        return blueprint
    if len(reasons) > 1:
        log.info("each rank builds the whole model first: %s", next(filter(None, reasons)))
    return Blueprint(_whole(section, config, auto_class, loading))


def _resized(config: PreTrainedConfig, vocab_size: int | None) -> PreTrainedConfig:
    resized = copy.deepcopy(config)
    if vocab_size is not None:
        set_size(resized, vocab_size)
    return resized


def _whole(
    section: ModelConfig,
    config: PreTrainedConfig,
    auto_class: Any,
    loading: Mapping[str, Any] | None,
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
    section: ModelConfig,
    config: PreTrainedConfig,
    auto_class: Any,
    seed: int,
    group: ProcessGroup | None,
) -> Blueprint:
    options: dict[str, Any] = {
        "dtype": fresh_dtype(config, section.dtype),
        "trust_remote_code": False,
    }
    if section.attn_implementation is not None:
        options["attn_implementation"] = section.attn_implementation

    def build() -> Any:
        return on_meta(lambda: auto_class.from_config(copy.deepcopy(config), **options))

    try:
        model, values = build(), InitialValues(build(), seed)
        if not values.are_complete():
            raise NotInParts(f"{type(model).__name__} has values that only its constructor knows")
    except _CANNOT_BUILD as error:
        raise NotInParts(
            f"it cannot be built without memory ({type(error).__name__}: {error})"
        ) from error
    source = None
    if section.from_pretrained is not None:
        source = _Source(section.from_pretrained, model, config, section)
    return Blueprint(model.train(), _materialiser(model, values, source, group))


def _materialiser(
    model: nn.Module, values: InitialValues, source: _Source | None, group: ProcessGroup | None
) -> Materialise:
    modules = dict(model.named_modules())
    transient = {
        name: {key for key in module._buffers if is_transient(module, key)}
        for name, module in modules.items()
    }

    def wanted(name: str, module: nn.Module) -> Callable[[str], bool]:
        if source is None:
            return lambda key: True
        return lambda key: key in transient[name] or f"{name}.{key}" in source.drawn

    def materialise(shared: nn.Module, device: torch.device) -> None:
        allocate(shared, device)
        here = set(shared.modules())
        left = {name: module for name, module in modules.items() if module in here}
        initialise(left, values, wanted)
        if source is not None:
            with raise_on_all_ranks(group):
                source.fill(shared, left)

    return materialise


def hold_names(model: Any, directory: Path | None) -> InFiles:
    """Tell checkpoints how files hold the tensors of *model*, of the base in *directory* where there is one. Call it
    before the model is shared out."""
    found = names_in_files(model, directory)
    model.names_in_files, model.parts_in_files = found
    return found


class _Source:
    """The files of a pretrained model, whose tensors are those of *model* one to one: :class:`NotInParts` if not.

    Those of the vocabulary may have another number of rows.
    """

    def __init__(
        self, name: str, model: Any, config: PreTrainedConfig, section: ModelConfig
    ) -> None:
        dtype, self._new_rows = section.dtype, section.new_tokens
        directory = fetched_directory(os.path.expanduser(name))
        if directory is None:
            raise NotInParts("its files cannot be fetched, or are no safetensors")
        if getattr(config, "quantization_config", None) is not None:
            raise NotInParts("it is quantized")
        if dtype == "auto" and not isinstance(config.dtype, torch.dtype):
            raise NotInParts("its configuration does not say its dtype")
        if model.dtype != torch.float32 and (
            model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict
        ):
            raise NotInParts("parts of it stay in float32")
        try:
            self._tensors: Tensors = open_weights(directory).modules[MODEL]
        except (CheckpointUnusable, OSError, KeyError) as error:
            raise NotInParts(f"its files cannot be read in parts ({error})") from error
        self._names, self._parts = hold_names(model, directory)
        self._verdict = self._compared(model)
        fqns = {stored: fqn for fqn, stored in self._names.items()}
        self._resized = {
            fqns.get(name, name): shapes for name, shapes in self._verdict.resized.items()
        }
        if (directory / "generation_config.json").is_file() and model.can_generate():
            model.generation_config = GenerationConfig.from_pretrained(directory)

    @property
    def drawn(self) -> set[str]:
        """The tensors whose new rows start from the model's own initial values."""
        return set(self._resized) if self._new_rows == "init" else set()

    def _compared(self, model: Any) -> Verdict:
        shapes, tied = module_shapes(model)
        there = {fqn: tensor.shape for fqn, tensor in self._tensors.tensors.items()}
        if set(tied) & set(there) and set(tied.values()) & set(there):
            raise NotInParts("its files hold tied tensors twice")
        resizable = {self._names.get(name, name) for name in vocabulary_names(model)}
        verdict = compare(
            Names(shapes, tied), Names(there), prefix=model.base_model_prefix, resizable=resizable
        )
        if different := verdict.lines(allowed=False):
            raise NotInParts(
                f"its files name other tensors ({different[0]}, {len(different)} in all)"
            )
        return verdict

    def fill(self, model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        """Read this rank's share. *modules* are those of the model as it was built that are left of it; they may be
        inside others now."""
        model = unwrap(model)
        # Of a model with adapters a checkpoint is no more than those; the files are the base's.
        adapted: Any = getattr(model, "get_base_model", None)
        model = adapted() if adapted is not None else model
        now = {id(module): name for name, module in model.named_modules()}
        fqns, fillings = {stored: fqn for fqn, stored in self._names.items()}, {}
        rows = {name: fqn for fqn, its in self._parts.items() for name in its}
        for name, (there, here) in self._resized.items():
            log_resized(name, there, here, self._new_rows)
        for name, stored in self._verdict.matches.items():
            parent, _, key = rows.get(name, fqns.get(name, name)).rpartition(".")
            if parent not in modules:
                continue
            outer = now[id(modules[parent])]
            fqn = f"{outer}.{key}" if outer else key
            filled = name if name in rows else name_in_files(model, fqn)
            fillings[filled] = Filling(self._tensors, stored, name in self._verdict.resized)
        # With adapters its checkpoints hold no experts, but they are read.
        held, model.parts_in_files = model.parts_in_files, self._parts
        fill_module(model, fillings, self._new_rows)
        model.parts_in_files = held
