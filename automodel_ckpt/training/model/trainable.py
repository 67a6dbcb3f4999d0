"""Building a model for training or for inference next to one: from files or a configuration to this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from automodel_ckpt.checkpoint.state.module_tensors import StoredLayout, stored_layout
from automodel_ckpt.models.inspect.float32_parts import float32_names
from automodel_ckpt.models.inspect.forward import accepts_use_cache
from automodel_ckpt.models.loss.loss_head import LossHead
from automodel_ckpt.models.model_checks import (
    check_attention,
    check_separate_memory,
    check_trained_types,
    router_settings,
)
from automodel_ckpt.parallel.mesh_sizes import choose_strategy
from automodel_ckpt.parallel.model_layers import decoder_layers
from automodel_ckpt.parallel.precision import (
    compute_dtype,
    describe_precision,
    float32_precision,
    keeps_frozen_types,
    keeps_masters,
    resolve_precision,
    with_parameter_type,
)
from automodel_ckpt.parallel.running_statistics import keep_frozen_statistics
from automodel_ckpt.training.model.changes import change_model
from automodel_ckpt.training.model.deferred_model import build_unsharded
from automodel_ckpt.training.model.probes import (
    add_embedding_noise,
    add_fake_quantization,
    choose_router_settings,
    install_mtp,
    probe,
    remove_dropout,
)
from automodel_ckpt.training.model.sections import ModelRequest, logs_mfu, read_model_config
from automodel_ckpt.training.model.sharding import (
    check_cuda_graphs,
    check_mesh,
    has_cuda_graphs,
    shard_for_training,
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
    from automodel_ckpt.training.model.row_sharing import Rows


@dataclass(frozen=True, slots=True)
class Trainable:
    """This rank's shards of a model, or of one pipeline stage, and how its forward pass is called."""

    model: nn.Module
    forward_options: Mapping[str, Any] = field(default_factory=dict)
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

    @property
    def stored_layout(self) -> StoredLayout:
        """How checkpoints store the tensors of the model."""
        return stored_layout(self.model)

    def forward(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        """Call the model with *inputs* on its device, in the dtype that all ranks compute in. Returns its output."""
        with self.compute():
            return self.model(**inputs, **self.forward_options)


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
    changed = change_model(request, build_unsharded(request))
    model = changed.deferred.model
    if request.is_trained:
        remove_dropout(request, model)
        check_trained_types(model)
        check_separate_memory(model)
        keep_frozen_statistics(model)
    # A cache of keys and values serves generation only, and costs time and memory in each step. With one, models
    # of transformers do not look for the samples of a packed row.
    options: dict[str, Any] = {"use_cache": False} if accepts_use_cache(model) else {}
    router = choose_router_settings(request, model)
    if router is None and router_settings(model) is not None:
        # Otherwise the model would compute router logits that nothing uses.
        options["output_router_logits"] = False
    check_mesh(request, model)
    trainable = Trainable(
        model,
        options,
        adapted=changed.adapted,
        fake_quantization=add_fake_quantization(request, model),
        resized=changed.resized,
        has_task_head=request.has_task_head,
        other_head=changed.other_head,
        flop_count=_flop_count(request, model),
        summary=_summary(request, model),
        precision=_precision(request, model),
    )
    if request.is_dry_run:
        return trainable
    check_attention(model, layout.device)
    uses_graphs = has_cuda_graphs(typed, layout)
    if uses_graphs and request.is_trained:
        check_cuda_graphs(typed, layout, has_routers=router is not None)
    sharded = shard_for_training(request, changed.deferred)
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


def _flop_count(request: ModelRequest, model: nn.Module) -> FlopCount | None:
    """Count the operations of a step, before the model is divided. Returns None where the log does not have them."""
    if not logs_mfu(request.config.logging, request.layout):
        return None
    from automodel_ckpt.models.measure.flop_count import count_flops

    return count_flops(model, decoder_layers(model))


def _summary(request: ModelRequest, model: nn.Module) -> str:
    num_all, num_trained = 0, 0
    for parameter in model.parameters():
        num_all += parameter.numel()
        if parameter.requires_grad:
            num_trained += parameter.numel()
    text = f"{type(model).__name__} with {num_all:,} parameters"
    if num_trained != num_all:
        text += f", {num_trained:,} of them trained"
    sizes = request.layout.sizes
    text += "; 1 rank" if sizes.world == 1 else f"; {sizes.world} ranks"
    text += f", {choose_strategy(request.config.distributed.strategy, sizes)}"
    if max(sizes.dp_replicate, sizes.tp, sizes.pp, sizes.cp, sizes.ep) > 1:
        text += f" ({sizes})"
    return text


def _precision(request: ModelRequest, model: nn.Module) -> str:
    section, device_type = request.config.distributed, request.layout.device.type
    products = float32_precision(request.config, device_type) if device_type == "cuda" else None
    strategy = choose_strategy(section.strategy, request.layout.sizes)
    dtype = compute_dtype(section)
    kept = float32_names(model, dtype) if strategy == "fsdp2" else ()
    return describe_precision(
        model,
        strategy=strategy,
        compute_type=dtype,
        products=products,
        num_in_float32=sum(model.get_parameter(name).dtype == torch.float32 for name in kept),
    )
