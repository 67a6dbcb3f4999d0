"""Building a model for training or for inference next to one: from files or a configuration to this rank's shards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.checkpoint.state.module_tensors import (
    record_complete_tensors,
    set_stored_layout,
)
from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.data.collate import Tensors
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.build import build_errors
from automodel_ckpt.models.hf_names import tensor_names_in
from automodel_ckpt.models.inspect.interface import (
    accepts_use_cache,
    num_embeddings,
    resize_vocabulary,
    vocabulary_names,
    wanted_size,
)
from automodel_ckpt.models.inspect.repository import base_directory, quiet
from automodel_ckpt.models.loss.loss_head import LossHead
from automodel_ckpt.models.meta_init import float32_names
from automodel_ckpt.models.model_checks import (
    check_attention,
    check_separate_memory,
    check_trained_types,
    router_settings,
)
from automodel_ckpt.parallel.gradients import keep_frozen_statistics
from automodel_ckpt.parallel.mesh_sizes import choose_strategy
from automodel_ckpt.parallel.model_layers import decoder_layers
from automodel_ckpt.training.model.deferred_model import (
    DeferredModel,
    build_unsharded,
    check_cuda_graphs,
    check_mesh,
    has_cuda_graphs,
    shard,
    skeleton,
)
from automodel_ckpt.training.model.pretrained_files import layout_in_files, types_in_files
from automodel_ckpt.training.model.probes import (
    add_embedding_noise,
    add_fake_quantization,
    choose_router_settings,
    install_mtp,
    probe,
    remove_dropout,
)
from automodel_ckpt.training.model.sections import (
    ModelRequest,
    activation_mode,
    compiles_kernels,
    compute_dtype,
    describe_precision,
    fuses_layers,
    keeps_frozen_types,
    keeps_masters,
    logs_mfu,
    read_model_config,
    resolve_precision,
    text_tokenizer,
    with_parameter_type,
)

if TYPE_CHECKING:
    from automodel_ckpt.loss.router_loss import RouterLoss
    from automodel_ckpt.models.layers.adapter import Adapted
    from automodel_ckpt.models.layers.fake_quantization import FakeQuantization
    from automodel_ckpt.models.layers.neftune import EmbeddingNoise
    from automodel_ckpt.models.loss.mtp import MultiTokenPrediction
    from automodel_ckpt.models.measure.flop_count import FlopCount
    from automodel_ckpt.parallel.context_parallel import ContextParallel
    from automodel_ckpt.training.model.pipeline import PipelineStage
    from automodel_ckpt.training.model.probes import Rows

log = logging.getLogger("automodel_ckpt")


def _change_model(
    request: ModelRequest, deferred: DeferredModel
) -> tuple[DeferredModel, ValueDict]:
    """Resize the vocabulary, record the stored layout, and add adapters or freeze parameters.

    Returns the changed model, and the fields of :class:`Trainable` that describe the changes.
    """
    section, model = request.config.model, deferred.model
    from automodel_ckpt.models.model_checks import freeze

    if isinstance(section, Target):
        if request.is_trained:
            freeze(model, [])  # raises if the model has nothing to train
        else:
            model.requires_grad_(False)
        return deferred, {}
    assert request.model_config is not None
    # Before model.vocab_size changes it.
    configured = getattr(request.model_config.get_text_config(), "vocab_size", None)
    num_base_rows = configured or num_embeddings(model)
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
        from automodel_ckpt.training.model.adapters import adapt

        adapted = adapt(request, model, num_base_rows)
        deferred = _with_copies(replace(deferred, model=adapted.model))
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
        deferred.model.requires_grad_(False)
    elif section.activation_checkpointing:
        _recompute_activations(request, deferred.model, activation_mode(section))
    return deferred, {
        "adapted": adapted,
        "resized": tuple(names.name_of(name) for name in resized),
        "other_head": other_head,
    }


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
    from automodel_ckpt.models.model_checks import freeze, narrow_frozen

    freeze(model, section.freeze, section.freeze_if_present)
    if not request.keeps_frozen_types or directory is None:
        return
    types = types_in_files(model, directory)
    for name in float32_names(model, compute_dtype(request.config.distributed)):
        types.pop(name, None)
    narrow_frozen(model, types)


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
        peft = request.config.peft
        with_adapters = with_adapters and (peft is None or peft.quantize_base is None)
    if with_layers:
        from automodel_ckpt.models.attention.positions import lay_out_position_biases
        from automodel_ckpt.models.layers.fused_gates import fuse_gates
        from automodel_ckpt.models.layers.fused_norms import fuse_norms
        from automodel_ckpt.models.layers.fused_rotary import fuse_rotary_embeddings

        fuse_norms(model)
        fuse_gates(model)
        fuse_rotary_embeddings(model)
        lay_out_position_biases(model)
    elif device_type == "cuda":
        from automodel_ckpt.models.layers.fused_rotary import restore_rotation

        restore_rotation(model)
    if with_adapters:
        from automodel_ckpt.models.layers.fused_adapters import fuse_adapters

        fuse_adapters(model)


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


@dataclass(frozen=True)
class Trainable:
    """This rank's shards of a model, or of one pipeline stage, and how its forward pass is called."""

    model: nn.Module
    forward_options: Values = field(default_factory=dict)
    """Arguments of each forward pass besides the rows."""
    compute: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The context of each forward pass, which sets the dtype that all ranks compute in."""
    row_layout: Rows | None = None
    """How samples share rows. None: each sample is padded to the longest."""
    overwrites_outputs: bool = False
    """Whether layers run as CUDA graphs, which overwrite their earlier outputs and gradients."""
    loss_head: LossHead | None = None
    """The output layer, if it computes the loss. None: the loss is computed from full logits."""
    all_up_to: int = 0
    """Number of positions in a micro-batch up to which the loss head takes those without a label too."""
    context: ContextParallel | None = None
    """How context parallel ranks divide rows. None: rows are not divided."""
    stage: PipelineStage | None = None
    """This rank's stage of a pipeline. None: the model is complete."""
    router_loss: RouterLoss | None = None
    """The load balancing loss of a mixture of experts. None: the model has none, or the recipe switches it off."""
    embedding_noise: EmbeddingNoise | None = None
    """The noise that training adds to embeddings (``model.neftune_alpha``). None: there is none."""
    mtp: MultiTokenPrediction | None = None
    """The layers that predict further tokens. None without a section ``model.mtp``."""
    adapted: Adapted | None = None
    """The adapters and their description. None without a ``peft`` section."""
    fake_quantization: FakeQuantization | None = None
    """The layers that compute with rounded values. None without a ``qat`` section."""
    resized: tuple[str, ...] = ()
    """Names in files of the parameters that ``model.vocab_size`` gives another number of rows."""
    has_task_head: bool = False
    """Whether the model has a classification head, which its pretrained files may lack."""
    other_head: tuple[str, ...] = ()
    """Names of tensors in which exports and the pretrained files differ because they have different heads."""
    flop_count: FlopCount | None = None
    """The operations of a training step of the complete model. None when they are unknown."""
    summary: str = ""
    """The class and size of the model and how ranks share it, for the log."""
    precision: str = ""
    """The data types of the weights and of the computation, for the log."""

    def forward(self, inputs: Tensors) -> Any:
        """Call the model with *inputs* on its device, in the dtype that all ranks compute in. Returns its output."""
        with self.compute():
            return self.model(**inputs, **self.forward_options)


def check_before_data(request: ModelRequest) -> None:
    """Raise :class:`RecipeError` for a key that the device does not support, and for names that the model lacks.

    :func:`build_trainable` would raise the same, after the data were read. A model that cannot be built without memory
    is checked there.
    """
    config, section, device = request.config, request.config.model, request.layout.device
    if isinstance(section, Target):
        return
    if config.peft is not None:
        from automodel_ckpt.training.model.adapters import check_quantization

        check_quantization(config, request.layout)
    if config.fp8 is not None:
        from automodel_ckpt.models.layers.fp8 import require_fp8

        require_fp8(device, emulate=config.fp8.emulate)
    attention = section.attn_implementation
    if config.peft is None and not section.freeze and attention is None:
        return
    assert request.model_config is not None
    options = {} if attention is None else {"attn_implementation": attention}
    with build_errors(section.from_pretrained):
        model = skeleton(request.model_config, request.auto_class, section, **options)
    if model is None:
        return
    check_attention(model, device)
    # build_trainable() does the same to the model itself, and logs it.
    with quiet(log.name):
        if config.peft is not None:
            from automodel_ckpt.models.layers.adapter_layers import find_layers
            from automodel_ckpt.training.model.adapters import head_of, lora_of

            find_layers(model, lora_of(config.peft), head_of(request, model))
        else:
            from automodel_ckpt.models.model_checks import freeze

            freeze(model, section.freeze, section.freeze_if_present)


def build_trainable(request: ModelRequest) -> Trainable:
    """Build the model that the sections ``model``, ``peft``, ``distributed`` and ``compile`` describe. A collective.

    Call it once for each model of a run: for another one (a reference, a teacher, a reward model) with a config in
    which these sections are replaced. Raises :class:`RecipeError` for what the model or the ranks do not support, on
    all ranks, and :class:`CheckpointUnusable` for damaged files of the base.
    """
    layout = request.layout
    # Another model of a run is described by values of a recipe file too, and so by null and auto.
    config = resolve_precision(request.config, layout.sizes, layout.device.type)
    model_config = request.model_config
    if model_config is None:
        model_config = read_model_config(
            config, layout, auto_class=request.auto_class, preprocessor=request.preprocessor
        )
    typed = with_parameter_type(
        config, model_config, device_type=layout.device.type, is_trained=request.is_trained
    )
    request = replace(
        request,
        config=typed,
        model_config=model_config,
        keeps_masters=keeps_masters(config),
        keeps_frozen_types=keeps_frozen_types(config),
    )
    deferred, changes = _change_model(request, build_unsharded(request))
    model = deferred.model
    if request.is_trained:
        remove_dropout(request, model)
        check_trained_types(model)
        check_separate_memory(model)
        keep_frozen_statistics(model)
    # A cache of keys and values serves generation only, and costs time and memory in each step. With one, models
    # of transformers do not look for the samples of a packed row.
    options: ValueDict = {"use_cache": False} if accepts_use_cache(model) else {}
    router = choose_router_settings(request, model)
    if router is None and router_settings(model) is not None:
        # Otherwise the model would compute router logits that nothing uses.
        options["output_router_logits"] = False
    check_mesh(request, model)
    flop_count = None
    if logs_mfu(config.logging, layout):
        from automodel_ckpt.models.measure.flop_count import count_flops

        # Before the model is divided.
        flop_count = count_flops(model, decoder_layers(model))
    trainable = Trainable(
        model,
        options,
        **changes,
        fake_quantization=add_fake_quantization(request, model),
        has_task_head=request.has_task_head,
        flop_count=flop_count,
        summary=_summary(request, model),
        precision=describe_precision(request.config, layout, model),
    )
    if request.is_dry_run:
        return trainable
    check_attention(model, layout.device)
    uses_graphs = has_cuda_graphs(typed, layout)
    if uses_graphs and request.is_trained:
        check_cuda_graphs(typed, layout, has_routers=router is not None)
    sharded = shard(deferred, typed, layout)
    probed = probe(request, model, sharded, options, router)
    return replace(
        trainable,
        model=sharded.model,
        compute=sharded.compute,
        stage=sharded.stage,
        overwrites_outputs=uses_graphs,
        **probed,
        # After the probes, which compare outputs.
        embedding_noise=add_embedding_noise(request, model),
        mtp=install_mtp(request, model, probed["context"]),
    )


def _with_copies(deferred: DeferredModel) -> DeferredModel:
    """Let the modules of ``modules_to_save`` begin as copies of the modules of the base."""
    from automodel_ckpt.models.layers.adapter import copy_saved_modules

    materialise = deferred.materialise
    if materialise is None:
        return deferred

    def materialise_both(shared: nn.Module, device: torch.device) -> None:
        materialise(shared, device)
        copy_saved_modules(shared)

    return replace(deferred, materialise=materialise_both)


def _summary(request: ModelRequest, model: nn.Module) -> str:
    num_all, num_trained = 0, 0
    for parameter in model.parameters():
        num_all += parameter.numel()
        if parameter.requires_grad:
            num_trained += parameter.numel()
    # Layers with weights in 4 bits.
    num_all += sum(getattr(module, "num_uncounted", 0) for module in model.modules())
    text = f"{type(model).__name__} with {num_all:,} parameters"
    if num_trained != num_all:
        text += f", {num_trained:,} of them trained"
    sizes = request.layout.sizes
    text += "; 1 rank" if sizes.world == 1 else f"; {sizes.world} ranks"
    text += f", {choose_strategy(request.config.distributed.strategy, sizes)}"
    if max(sizes.dp_replicate, sizes.tp, sizes.pp, sizes.cp, sizes.ep) > 1:
        text += f" ({sizes})"
    return text
