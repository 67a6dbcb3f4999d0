"""The changes of a recipe to an unsharded model: its vocabulary, FP8 layers, adapters, and which parameters train."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.state.module_tensors import (
    record_complete_tensors,
    set_stored_layout,
)
from automodel_ckpt.config.keys.model import ModelConfig, PeftConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.hf_names import tensor_names_in
from automodel_ckpt.models.inspect.float32_parts import float32_names
from automodel_ckpt.models.inspect.repository import base_directory
from automodel_ckpt.models.inspect.vocabulary import (
    num_embeddings,
    resize_vocabulary,
    vocabulary_names,
    wanted_size,
)
from automodel_ckpt.parallel.model_layers import decoder_layers
from automodel_ckpt.parallel.precision import compute_dtype
from automodel_ckpt.training.model.deferred_model import DeferredModel
from automodel_ckpt.training.model.pretrained_files import layout_in_files, types_in_files
from automodel_ckpt.training.model.sections import (
    ModelRequest,
    activation_mode,
    compiles_kernels,
    fuses_layers,
    text_tokenizer,
)

if TYPE_CHECKING:
    from automodel_ckpt.models.layers.adapter import Adapted

log = logging.getLogger("automodel_ckpt")


@dataclass(frozen=True, slots=True)
class ChangedModel:
    """An unsharded model after the changes that the recipe makes to it."""

    deferred: DeferredModel
    adapted: Adapted | None = None
    """The adapters. None without a ``peft`` section."""
    resized: tuple[str, ...] = ()
    """Names in files of the parameters that ``model.vocab_size`` gives another number of rows."""
    other_head: tuple[str, ...] = ()
    """Names of tensors in which exports and the pretrained files differ because they have different heads."""


def change_model(request: ModelRequest, deferred: DeferredModel) -> ChangedModel:
    """Resize the vocabulary, record the stored layout, and add adapters or freeze parameters."""
    section, model = request.config.model, deferred.model
    from automodel_ckpt.models.layers.freezing import freeze

    if isinstance(section, Target):
        if request.is_trained:
            freeze(model, [])  # raises if the model has nothing to train
        else:
            _freeze_all(model)
        return ChangedModel(deferred)
    num_base_rows = _num_base_rows(request, model)
    resized = _resize(request, model, section)
    directory = None
    if section.from_pretrained is not None:
        directory = base_directory(section.from_pretrained, section.revision)
    # Before adapters and sharding, which change names and shapes.
    names = layout_in_files(model, directory)
    set_stored_layout(model, names)
    other_head: tuple[str, ...] = ()
    if request.has_task_head and directory is not None:
        from automodel_ckpt.models.task_head import expected_differences

        other_head = expected_differences(model, tensor_names_in(directory))
    # Before adapters, which compute in their own dtype around the layers of the base.
    _use_fp8(request, model)
    adapted = None
    if request.config.peft is not None:
        adapted = _with_adapters(request, model, request.config.peft, num_base_rows)
        from automodel_ckpt.training.model.adapters import with_copies

        deferred = with_copies(deferred, adapted.model)
    else:
        if getattr(model, "is_quantized", False):
            from automodel_ckpt.models.quantize import check_not_quantized

            check_not_quantized(model)
        if request.is_trained:
            _freeze(request, model, section, directory)
        if names.rows:
            # Each rank stores its own experts; with this, all ranks know the names of all experts.
            record_complete_tensors(model)
    _fuse_layers(request, deferred.model)
    if not request.is_trained:
        _freeze_all(deferred.model)
    elif section.activation_checkpointing:
        _recompute_activations(request, deferred.model, activation_mode(section))
    return ChangedModel(
        deferred,
        adapted,
        resized=tuple(names.name_of(name) for name in resized),
        other_head=other_head,
    )


def _num_base_rows(request: ModelRequest, model: nn.Module) -> int | None:
    """Rows of the embedding before ``model.vocab_size`` changes it."""
    assert request.model_config is not None
    configured = getattr(request.model_config.get_text_config(), "vocab_size", None)
    return configured or num_embeddings(model)


def _resize(request: ModelRequest, model: nn.Module, section: ModelConfig) -> tuple[str, ...]:
    """Apply ``model.vocab_size``. Returns the FQNs of the parameters that it concerns."""
    size = wanted_size(section.vocab_size, text_tokenizer(request.preprocessor))
    if size is None:
        return ()
    names = tuple(vocabulary_names(model))
    if section.from_pretrained is not None:
        # A model on the meta device has this size already. A model with values has the size of its files.
        resize_vocabulary(model, size, section.new_tokens)
    return names


def _use_fp8(request: ModelRequest, model: nn.Module) -> None:
    """Let linear layers of *model* compute in FP8 if the recipe asks for it.

    A dry run leaves it out: it needs neither torchao nor a GPU.
    """
    section = request.config.fp8
    if section is None or request.is_dry_run or not request.is_trained:
        return
    from automodel_ckpt.models.layers.fp8 import convert_to_fp8

    convert_to_fp8(
        model,
        recipe=section.recipe,
        exclude=section.exclude,
        emulate=section.emulate,
        device=request.layout.device,
    )


def _freeze(
    request: ModelRequest, model: nn.Module, section: ModelConfig, directory: Path | None
) -> None:
    """Apply ``model.freeze`` to *model*. Its pretrained files are in *directory* (None: fresh weights)."""
    from automodel_ckpt.models.layers.freezing import freeze, narrow_frozen

    freeze(model, section.freeze, section.freeze_if_present)
    if not request.keeps_frozen_types or directory is None:
        return
    types = types_in_files(model, directory)
    for name in float32_names(model, compute_dtype(request.config.distributed)):
        types.pop(name, None)
    narrow_frozen(model, types)


def _with_adapters(
    request: ModelRequest, model: nn.Module, section: PeftConfig, num_base_rows: int | None
) -> Adapted:
    """Add the adapters of *section* to *model*, in place. Its base has *num_base_rows* embeddings."""
    from automodel_ckpt.training.model.adapters import adapt

    head: tuple[str, ...] = ()
    if request.has_task_head:
        from automodel_ckpt.models.task_head import head_modules

        head = head_modules(model)

    adapted = adapt(model, section, num_base_rows, request.task_type, head=head)
    if request.keeps_masters:
        from automodel_ckpt.models.layers.adapter import widen_trained

        widen_trained(adapted.model)
    return adapted


def _is_quantized(config: RecipeConfig) -> bool:
    return config.peft is not None and config.peft.quantize_base is not None


def _fuse_layers(request: ModelRequest, model: nn.Module) -> None:
    """Let layers of *model* and its adapters compute with fewer kernels, as ``model.fused_layers`` asks."""
    device_type = request.layout.device.type
    with_layers = fuses_layers(request.config, device_type)
    section = request.config.model
    # Selective recomputation keeps the results of matrix products, which fused adapters change in place.
    is_selective = isinstance(section, ModelConfig) and activation_mode(section) == "selective"
    with_adapters = with_layers and not is_selective
    if request.is_dry_run:
        # Of compiled layers, the backward pass needs about the same tensors as of fused ones.
        with_layers = with_layers or compiles_kernels(request.config, device_type)
        # Adapters of layers that are quantized when they are read.
        with_adapters = with_adapters and not _is_quantized(request.config)
    numbers = {}
    if with_layers:
        from automodel_ckpt.models.attention.position_bias import lay_out_position_biases
        from automodel_ckpt.models.layers.fused_gates import fuse_gates
        from automodel_ckpt.models.layers.fused_norms import fuse_norms
        from automodel_ckpt.models.layers.fused_rotary import fuse_rotary_embeddings

        numbers = {
            "RMS normalization": fuse_norms(model),
            "gated layer": fuse_gates(model),
            "rotary embedding": fuse_rotary_embeddings(model),
            "position bias": lay_out_position_biases(model),
        }
    elif device_type == "cuda":
        from automodel_ckpt.models.layers.fused_rotary import restore_rotation

        restore_rotation(model)
    if with_adapters:
        from automodel_ckpt.models.layers.fused_adapters import fuse_adapters

        numbers["adapter"] = fuse_adapters(model)
    found = [counted(number, noun) for noun, number in numbers.items() if number]
    if found:
        log.info("kernels are fused in %s (model.fused_layers)", ", ".join(found))


def _recompute_activations(request: ModelRequest, model: nn.Module, mode: str) -> None:
    layers = decoder_layers(model)
    if request.layout.sizes.ep > 1 and mode == "selective":
        raise RecipeError(
            "experts that ranks divide are gathered while activations are recorded",
            where="model.activation_checkpointing",
            value=f"selective, with distributed.ep_size {request.layout.sizes.ep}",
            hint="set it to full",
        )
    from automodel_ckpt.models.layers.activation_memory import checkpoint_activations

    checkpoint_activations(model, mode, layers)
    log.info("activations of %s are recomputed (%s)", counted(len(layers), "layer"), mode)


def _freeze_all(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
