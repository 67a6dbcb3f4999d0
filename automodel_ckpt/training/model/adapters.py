"""The ``peft`` section: a base on disk, its quantization, adapters in the model, and the side files of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from automodel_ckpt.base.store_url import cache_directory
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
from automodel_ckpt.models.fresh_base import make_base
from automodel_ckpt.models.inspect.forward import model_without_adapters
from automodel_ckpt.models.inspect.repository import base_directory
from automodel_ckpt.models.layers.adapter import (
    Adapted,
    add_adapters,
    widen_trained,
)
from automodel_ckpt.models.layers.lora import Lora
from automodel_ckpt.models.quantize import quantized_loading
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.mesh_sizes import choose_strategy
from automodel_ckpt.parallel.ranks.agree import raise_on_all_ranks
from automodel_ckpt.training.model.sections import ModelRequest, repository_options


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


def quantization(config: RecipeConfig, layout: RankLayout) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for ``peft.quantize_base``. Empty without it.

    Raises :class:`RecipeError` if the device or the strategy does not support it.
    """
    section: Any = config.model
    if config.peft is None or config.peft.quantize_base is None:
        return {}
    strategy = choose_strategy(config.distributed.strategy, layout.sizes)
    return quantized_loading(
        config.peft.quantize_base,
        device=layout.device,
        strategy=strategy,
        dtype=section.dtype or "float32",
    )


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
