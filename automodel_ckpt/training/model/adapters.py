"""The ``peft`` section: a base on disk, its quantization, adapters in the model, and the side files of both."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from automodel_ckpt.base.store_url import cache_directory
from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.export.base_identity import BaseIdentity, identify_base
from automodel_ckpt.checkpoint.export.hf_assets import HFAssets
from automodel_ckpt.checkpoint.files.layout import ADAPTER_MODEL_CONFIG
from automodel_ckpt.checkpoint.saving.adapter_assets import AdapterAssets, peft_document
from automodel_ckpt.checkpoint.state.module_tensors import (
    StoredLayout,
    TensorSpec,
    set_stored_layout,
    tensor_specs,
)
from automodel_ckpt.config.keys.model import PeftConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models import quantize
from automodel_ckpt.models.fresh_base import make_base
from automodel_ckpt.models.inspect.interface import model_without_adapters
from automodel_ckpt.models.inspect.repository import base_directory
from automodel_ckpt.models.layers.adapter import (
    Adapted,
    add_adapters,
    widen_trained,
)
from automodel_ckpt.models.layers.adapter_layers import find_modules
from automodel_ckpt.models.layers.lora import Lora
from automodel_ckpt.models.layers.quantized_linear import quantize_layers
from automodel_ckpt.models.loss.loss_head import output_layer
from automodel_ckpt.models.loss.mtp import is_of_mtp
from automodel_ckpt.models.meta_init import float32_names
from automodel_ckpt.parallel.mesh_sizes import RankLayout, choose_strategy
from automodel_ckpt.parallel.ranks.agree import raise_on_all_ranks
from automodel_ckpt.training.model.sections import ModelRequest, repository_options

log = logging.getLogger("automodel_ckpt")

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of <malloc.h>."""


def lora_of(section: PeftConfig) -> Lora:
    """The fields of the section that describe the adapters, without the fields that describe the base."""
    fields = {field.name: getattr(section, field.name) for field in dataclasses.fields(Lora)}
    return Lora(**fields)


def fresh_base(request: ModelRequest) -> None:
    """Write a model of ``model.from_config`` with fresh weights to ``peft.base_dir``, unless it exists. A collective.

    Raises :class:`RecipeError` on all ranks if it cannot be written or is another model.
    """
    config, layout = request.config, request.layout
    section: Any = config.model
    assert config.peft is not None and config.peft.base_dir is not None
    assert request.model_config is not None
    directory = Path(config.peft.base_dir).expanduser()

    # Its end is a collective: the other ranks read the base only after rank 0 has written it.
    with raise_on_all_ranks(layout.gloo_group):
        if layout.is_rank0:
            make_base(
                directory,
                request.model_config,
                auto_class=request.auto_class,
                # The same files on every machine, whatever the device that trains adapters on them.
                dtype=section.dtype or "float32",
                seed=config.seed,
                preprocessor=request.preprocessor,
                repository=repository_options(section),
            )


def check_quantization(config: RecipeConfig, layout: RankLayout) -> None:
    """Raise :class:`RecipeError` if the device or the strategy does not support ``peft.quantize_base``."""
    kind = None if config.peft is None else config.peft.quantize_base
    if kind is not None:
        strategy = choose_strategy(config.distributed.strategy, layout.sizes)
        quantize.check_quantization(kind, device=layout.device, strategy=strategy)


def quantized_loading(request: ModelRequest) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for a base in 8 bits. Empty for others."""
    peft = request.config.peft
    if peft is None or peft.quantize_base != "int8" or request.is_dry_run:
        return {}
    return quantize.int8_loading(request.layout.device)


def quantize_base(request: ModelRequest, model: nn.Module) -> None:
    """Let the linear layers of *model* have weights in 4 bits if ``peft.quantize_base`` asks for it.

    Layers that are trained in full and the output layer are not quantized, as with transformers. A dry run leaves the
    model as it is, and computes the bytes. Raises :class:`RecipeError` if there is nothing to quantize.
    """
    peft, device = request.config.peft, request.layout.device
    kind = None if peft is None else peft.quantize_base
    if peft is None or kind is None or kind == "int8" or request.is_dry_run:
        return
    head = head_of(request, model)
    _, saved = find_modules(model, lora_of(peft), head)
    outputs = output_layer(model)
    excluded = {*saved, *head}
    for name, module in model.named_modules():
        if module is outputs or is_of_mtp(name):
            excluded.add(name)
    # A model that keeps a layer in float32 needs it.
    names = float32_names(model, torch.bfloat16)
    excluded.update(name.rpartition(".")[0] for name in names)
    quantized = quantize_layers(model, kind, device, excluded=excluded)
    if not quantized:
        raise RecipeError(
            "the base has no linear layer that can be quantized",
            where="peft.quantize_base",
            value=f"{kind}, {type(model).__name__}",
            hint="remove the key",
        )
    log.info("the base has %s in 4 bits (%s)", counted(len(quantized), "linear layer"), kind)
    if device.type == "cpu":
        log.warning("a CPU dequantizes the layers slowly in each pass (peft.quantize_base)")
        _return_freed_memory()


def _return_freed_memory() -> None:
    """Let glibc give freed tensors of a megabyte back to the system.

    By default, it keeps blocks of up to 32 MB between smaller ones that are in use: gathered and dequantized weights
    leave gaps that take several times their bytes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 20)


def head_of(request: ModelRequest, model: nn.Module) -> tuple[str, ...]:
    """The names of the modules of a classification head, which are trained in full. Empty for other models."""
    if not request.has_task_head:
        return ()
    from automodel_ckpt.models.task_head import head_modules

    return head_modules(model)


def adapt(request: ModelRequest, model: nn.Module, num_base_rows: int | None) -> Adapted:
    """Add the adapters of the section ``peft`` to *model*, in place. Its base has *num_base_rows* embeddings."""
    assert request.config.peft is not None
    # Checkpoints store only the adapters, under peft's names.
    set_stored_layout(model, StoredLayout())
    adapted = add_adapters(
        model,
        lora_of(request.config.peft),
        task_type=request.task_type,
        num_base_rows=num_base_rows,
        head=head_of(request, model),
    )
    if request.keeps_masters:
        widen_trained(adapted.model)
    return adapted


def adapter_assets(
    model: nn.Module,
    adapted: Adapted,
    base_name: str,
    *,
    revision: str | None = None,
    run: Path,
    preprocessor: Any,
    reads_base: bool,
    has_own_config: bool = False,
    further: Mapping[str, bytes] | None = None,
) -> AdapterAssets:
    """The files next to the adapters in a checkpoint.

    *revision* is the revision of a base with a Hub name. *reads_base*: compute the digest of the base, on rank 0.
    *has_own_config*: the config of *model* is one of these files, because the config of the base has another head.
    *further* are files of the recipe, by relative path.
    """
    directory = base_directory(base_name, revision)
    tensors: dict[str, TensorSpec] = tensor_specs(model)
    identity: BaseIdentity | None = None
    if reads_base and directory is not None:
        identity = identify_base(base_name, directory, run=run, cache=cache_directory())
    # peft loads this revision of the base.
    peft_config = peft_document(adapted.peft_config)
    if revision is not None:
        peft_config["revision"] = revision
    files = dict(further or {})
    if has_own_config:
        inner = model_without_adapters(model)
        files[ADAPTER_MODEL_CONFIG] = HFAssets.from_model(inner).config_json()
    return AdapterAssets(
        peft_config,
        adapted.description,
        tensors=tensors,
        base=identity,
        tokenizer=preprocessor,
        base_dir=directory,
        further=files,
    )
