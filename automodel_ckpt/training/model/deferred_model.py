"""From a model on the meta device, where possible, to this rank's shards with their values or to its pipeline stage."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedConfig

from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.config.callables.plugins import build
from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.build import (
    build_model,
    fresh_dtype,
    restore_attention_caps,
    uses_code,
    with_attention_caps,
)
from automodel_ckpt.models.inspect.interface import naming_files, set_size, wanted_size
from automodel_ckpt.models.inspect.repository import importing_code
from automodel_ckpt.models.meta_init import (
    CANNOT_BUILD,
    InitialValues,
    allocate,
    constants_in,
    float32_names,
    initialise,
    is_transient,
    on_meta,
)
from automodel_ckpt.models.model_checks import check_complete
from automodel_ckpt.parallel.mesh_sizes import RankLayout, choose_strategy
from automodel_ckpt.parallel.model_layers import decoder_layers
from automodel_ckpt.parallel.parallelize import Materialise, compute_context, parallelize
from automodel_ckpt.parallel.ranks.agree import gather_or_raise, raise_on_all_ranks
from automodel_ckpt.training.model.pretrained_files import (
    NotDeferrable,
    PretrainedFiles,
    verify_base,
)
from automodel_ckpt.training.model.sections import (
    ModelRequest,
    balancing_scope,
    num_micro_batches,
    parallelism,
    repository_options,
    text_tokenizer,
)

if TYPE_CHECKING:
    from automodel_ckpt.models.loss.mtp_families import MtpPlan
    from automodel_ckpt.training.model.pipeline import PipelineStage


log = logging.getLogger("automodel_ckpt")


@dataclass(frozen=True)
class DeferredModel:
    """A model on the meta device, and the function that fills what is left of it on this rank after sharding.

    If *materialise* is None, the model has its values, which are the same on all ranks.
    """

    model: nn.Module
    materialise: Materialise | None = None


def build_deferred(
    section: ModelConfig,
    config: PreTrainedConfig,
    *,
    base: str | None,
    auto_class: Any,
    seed: int,
    group: ProcessGroup | None,
    vocab_size: int | None = None,
    needs_values: str = "",
    loading: Values | None = None,
    mtp: MtpPlan | None = None,
    allow_new_head: bool = False,
) -> DeferredModel:
    """Build the model that a recipe's *section* describes. A collective. All ranks return the same kind of model.

    *base* is the directory or Hub name of the weights: ``from_pretrained`` of the section, or ``peft.base_dir``. None:
    fresh weights.
    A pretrained model has an embedding of *vocab_size* rows. None: as many as its files have. Each rank builds the
    complete model, with the number of rows of the files, if shards of it cannot be filled separately: if the files have
    other names than the model's tensors, or because of *needs_values* (a reason) or *loading* (further arguments of
    ``from_pretrained``). The reason is logged. The model gets the layers of *mtp* (None: none). With *allow_new_head*,
    the head of a classification model gets random values where the files lack it. Raises
    :class:`RecipeError` as :func:`~automodel_ckpt.models.build.build_model` does, and for a base without these layers.
    """
    deferred: DeferredModel | None = None

    def reason_here() -> str:
        nonlocal deferred
        try:
            if needs_values or loading:
                raise NotDeferrable(needs_values or "its weights are changed while they are read")
            resized = copy.deepcopy(config)
            if vocab_size is not None:
                set_size(resized, vocab_size)
            deferred = _on_meta(
                section, base, resized, auto_class, seed, group, mtp, allow_new_head=allow_new_head
            )
        except NotDeferrable as error:
            return str(error)
        return ""

    # If one rank cannot read the files (another cache), all ranks build the complete model.
    reasons = gather_or_raise(group, reason_here)
    if deferred is not None and not any(reasons):
        return deferred
    if len(reasons) > 1:
        log.info("each rank builds the complete model first: %s", next(filter(None, reasons)))
    if mtp is not None and base is not None and not mtp.is_new:
        raise RecipeError(
            "the layers for multi-token prediction are read only from a base with files that can be read in parts",
            where="model.mtp.weights",
            value=f"{base}: {next(filter(None, reasons))}",
            hint="set weights: new for random initial values, or remove model.mtp",
        )
    from automodel_ckpt.models.inspect.interface import other_parts_in_files
    from automodel_ckpt.models.loss.mtp_families import patterns_in_files

    model = build_model(
        config,
        auto_class=auto_class,
        from_pretrained=base,
        dtype=section.dtype or "float32",
        attn_implementation=section.attn_implementation,
        allow_missing=section.allow_missing,
        allow_unexpected=section.allow_unexpected,
        loading=loading,
        repository=repository_options(section),
        not_in_model=[*patterns_in_files(config), *other_parts_in_files(config)],
        allow_new_head=allow_new_head,
    )
    if base is not None and not loading:
        _freeze_as_built(model, config, auto_class, section)
    if mtp is not None:
        from automodel_ckpt.models.loss.mtp import add_mtp

        add_mtp(model, mtp)
    return DeferredModel(model)


def _freeze_as_built(
    model: nn.Module, config: PreTrainedConfig, auto_class: Any, section: ModelConfig
) -> None:
    """Freeze the parameters that the class of *model* creates without gradients, such as biases that select experts.

    transformers' ``from_pretrained`` makes them trainable (seen with 5.23).
    """
    built = skeleton(config, auto_class, section)
    if built is None:
        return
    frozen = {name for name, each in built.named_parameters() if not each.requires_grad}
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)


def skeleton(
    config: PreTrainedConfig, auto_class: Any, section: ModelConfig, **more: Any
) -> nn.Module | None:
    """The model of *config* on the meta device, without the layers of ``model.mtp``. Draws no random numbers.

    *more* are arguments of ``from_config``; raises ImportError if they need a package that is not installed. Returns
    None when the model cannot be built without memory.
    """
    uses_code_of_base = uses_code(config, auto_class, repository_options(section))
    options = {"trust_remote_code": uses_code_of_base, **more}
    try:
        with importing_code(uses_code_of_base), torch.random.fork_rng(devices=[]):
            built: nn.Module = on_meta(
                lambda: _made(_not_quantized(config), auto_class, options, None)
            )
    except CANNOT_BUILD as error:
        if more and isinstance(error, ImportError):
            raise
        log.debug("the model cannot be built without memory", exc_info=True)
        return None
    return built


def _not_quantized(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of *config* without the settings of quantized files."""
    ordinary = copy.deepcopy(config)
    if hasattr(ordinary, "quantization_config"):
        del ordinary.quantization_config
    return ordinary


def _made(
    config: PreTrainedConfig,
    auto_class: Any,
    options: Values,
    mtp: MtpPlan | None,
) -> Any:
    """A model of *config* with the initial values of its class."""
    # transformers' from_config changes the config that it gets.
    model = auto_class.from_config(copy.deepcopy(config), **options)
    if mtp is not None:
        from automodel_ckpt.models.loss.mtp import add_mtp

        add_mtp(model, mtp)
    return model


def _on_meta(
    section: ModelConfig,
    base: str | None,
    config: PreTrainedConfig,
    auto_class: Any,
    seed: int,
    group: ProcessGroup | None,
    mtp: MtpPlan | None,
    *,
    allow_new_head: bool,
) -> DeferredModel:
    options: ValueDict = {
        "dtype": fresh_dtype(config, section.dtype or "float32"),
        "trust_remote_code": uses_code(config, auto_class, repository_options(section)),
    }
    if section.attn_implementation is not None:
        options["attn_implementation"] = section.attn_implementation

    # Files that can be read in parts are dequantized while they are read.
    ordinary = with_attention_caps(config if base is None else _not_quantized(config))

    def build() -> Any:
        with importing_code(options["trust_remote_code"]):
            return on_meta(lambda: _made(ordinary, auto_class, options, mtp))

    try:
        # Built twice: InitialValues needs one that nothing else changes, and the model is
        # resized, adapted and sharded in place.
        model, values = build(), InitialValues(build(), seed)
        if not values.are_complete():
            raise NotDeferrable(
                f"{type(model).__name__} has values that only its constructor knows"
            )
    except CANNOT_BUILD as error:
        raise NotDeferrable(
            f"it cannot be built without memory ({type(error).__name__}: {error})"
        ) from error
    source = None
    if base is not None:
        has_new_mtp = mtp is not None and mtp.is_new
        source = PretrainedFiles(
            base, model, config, section, new_mtp=has_new_mtp, allow_new_head=allow_new_head
        )
    return DeferredModel(model.train(), _materialiser(model, values, source, group))


def _materialiser(
    model: nn.Module,
    values: InitialValues,
    source: PretrainedFiles | None,
    group: ProcessGroup | None,
) -> Materialise:
    # Names before adapters change them: each module's random stream is seeded by its name.
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
        # A pipeline stage has lost the modules of the other stages.
        here = set(shared.modules())
        left = {name: module for name, module in modules.items() if module in here}
        initialise(left, values, wanted)
        if source is not None:
            # A node reads its own copy of the files, which may be damaged or missing there only.
            with raise_on_all_ranks(group):
                source.fill(shared, left)

    return materialise


def build_unsharded(request: ModelRequest) -> DeferredModel:
    """Build the model that the section ``model`` describes, without values where possible. A collective.

    Raises :class:`RecipeError` for what the model does not support, and :class:`CheckpointUnusable` for damaged files
    of the base.
    """
    config, layout = request.config, request.layout
    section = config.model
    if isinstance(section, Target):
        made = build(section)
        check_complete(made)
        if "attn_implementation" not in section.kwargs:
            restore_attention_caps(made)
        return DeferredModel(made)
    assert request.model_config is not None
    base = _base(request, section)
    if base is not None:
        # A dry run reads no weights.
        level = "size" if request.is_dry_run else config.checkpoint.verify
        verify_base(base, level, layout, layout.gloo_group, section.revision)
    needs_values, loading = "", None
    if config.peft is not None:
        from automodel_ckpt.models.layers.adapter import why_whole
        from automodel_ckpt.training.model import adapters

        if not request.is_dry_run:
            adapters.check_quantization(config, layout)
        needs_values = why_whole(adapters.lora_of(config.peft))
        loading = adapters.quantized_loading(request)
    files = f"config.json and generation_config.json of {base}" if base else "model.from_config"
    with naming_files("transformers cannot build this model", files):
        deferred = build_deferred(
            section,
            request.model_config,
            base=base,
            auto_class=request.auto_class,
            seed=config.seed,
            group=layout.gloo_group,
            vocab_size=wanted_size(section.vocab_size, text_tokenizer(request.preprocessor)),
            needs_values=needs_values,
            loading=loading,
            mtp=_mtp_plan(request, section, base),
            # A model that is not trained needs the head of its files.
            allow_new_head=request.has_task_head and request.is_trained,
        )
    if config.peft is not None:
        # Before the vocabulary is resized, adapters are added and ranks divide the model.
        adapters.quantize_base(request, deferred.model)
    return deferred


def _base(request: ModelRequest, section: ModelConfig) -> str | None:
    """The directory or Hub name of the pretrained weights. None for fresh weights.

    ``peft.base_dir`` is created first if it does not exist, except in a dry run.
    """
    peft = request.config.peft
    if peft is None or peft.base_dir is None:
        return section.from_pretrained
    if request.is_dry_run and not Path(peft.base_dir).expanduser().exists():
        # A dry run writes nothing: the base would have the shapes of model.from_config.
        return None
    from automodel_ckpt.training.model.adapters import fresh_base

    fresh_base(request)
    return peft.base_dir


def _mtp_plan(request: ModelRequest, section: ModelConfig, base: str | None) -> MtpPlan | None:
    """What the section ``model.mtp`` requests, or None without it. A model that is not trained gets no such layers."""
    if section.mtp is None or not request.is_trained:
        return None
    packs_images = request.packs_images and request.config.packed_sequence is not None
    if request.has_task_head or packs_images:
        raise RecipeError(
            "multi-token prediction does not support classification heads and packed samples with images",
            where="model.mtp",
            value="packed_sequence" if packs_images else type(request.auto_class).__name__,
            hint="remove the key",
        )
    assert request.model_config is not None
    from automodel_ckpt.models.loss.mtp_families import plan_mtp

    return plan_mtp(
        request.model_config,
        num_depths=section.mtp.num_depths,
        repeat_layer=section.mtp.repeat_layer,
        factor=section.mtp.loss_scaling_factor,
        is_new=base is None or section.mtp.weights == "new",
    )


# ---------------------------------------------------------------- shards


@dataclass(frozen=True)
class Sharded:
    """A model with this rank's values, the context of its forward pass, and its pipeline stage if it has one."""

    model: nn.Module
    compute: Callable[[], AbstractContextManager[Any]]
    stage: PipelineStage | None = None


def check_mesh(request: ModelRequest, model: nn.Module) -> None:
    """Raise :class:`RecipeError` if *model* cannot be divided over the dimensions of the device mesh."""
    layout = request.layout
    if layout.in_stages:
        if request.has_task_head:
            raise RecipeError(
                "a model with a classification head cannot be divided into pipeline stages",
                where="distributed.pp_size",
                value=layout.sizes.pp,
                hint="remove the key",
            )
        from automodel_ckpt.models.pipeline_stage import check_stages

        check_stages(model, layout.sizes.pp)
    if layout.sizes.cp > 1:
        from automodel_ckpt.parallel.context_parallel import check_context_parallel

        check_context_parallel(model)
    if layout.sizes.ep > 1:
        from automodel_ckpt.parallel.expert_parallel import check_experts

        check_experts(model, layout)


def shard(deferred: DeferredModel, config: RecipeConfig, layout: RankLayout) -> Sharded:
    """Leave this rank's shards of a model in place, with their values, as the section ``distributed`` asks.

    Decoder layers are compiled before, as ``compile`` asks, and may run as CUDA graphs. A collective.

    Raises :class:`RecipeError` for what this
    model does not support.
    """
    model, section = deferred.model, config.distributed
    plan = build(section.tp_plan, model=model) if section.tp_plan is not None else None
    how = replace(parallelism(section), tp_plan=plan)
    strategy = choose_strategy(how.strategy, layout.sizes)
    if strategy == "fsdp2":
        how = replace(how, float32_names=float32_names(model, how.compute_dtype))
        how = replace(how, constants=constants_in(model, how.compute_dtype))
    compute = compute_context(strategy, layout.device, how.compute_dtype)
    if has_cuda_graphs(config, layout):
        compute = _with_graphs(compute)
    stages = None
    if layout.in_stages:
        from automodel_ckpt.training.model.pipeline import split_stages

        # Under autocast, residual additions keep the hidden states in the weights' dtype.
        hidden_dtype = how.compute_dtype if strategy == "fsdp2" else None
        stages = split_stages(model, layout, plan, hidden_dtype)
        how = replace(how, tp_plan=stages.tp_plan)
    if config.compile.enabled:
        # Layer by layer and in place: torch.compile(model) would add `_orig_mod.` to all names.
        from automodel_ckpt.models.layers.compiling import compile_layers, num_row_widths

        settings = config.compile
        num_widths = num_row_widths(settings.row_widths, settings.dynamic, layout.device.type)
        compile_layers(
            decoder_layers(model),
            backend=settings.backend,
            mode=settings.mode,
            fullgraph=settings.fullgraph,
            dynamic=settings.dynamic,
            device=layout.device,
            num_widths=num_widths,
        )
    mesh = stages.mesh if stages is not None else None
    sharded = parallelize(model, layout, how, deferred.materialise, mesh)
    if stages is None:
        return Sharded(sharded, compute)
    from automodel_ckpt.training.model.pipeline import PipelineStage, log_idle_share

    log_idle_share(num_micro_batches(config, layout.dp_size), layout)
    return Sharded(sharded, compute, PipelineStage(sharded, layout, stages, section.pp_schedule))


def _with_graphs(
    compute: Callable[[], AbstractContextManager[Any]],
) -> Callable[[], AbstractContextManager[Any]]:
    """Let the context of a forward pass begin with the permission to reuse the memory of earlier outputs."""

    def marked() -> AbstractContextManager[Any]:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return compute()

    return marked


def has_cuda_graphs(config: RecipeConfig, layout: RankLayout) -> bool:
    """Whether layers run as CUDA graphs, by the section ``compile``."""
    if not config.compile.enabled:
        return False
    from automodel_ckpt.models.layers.compiling import uses_cuda_graphs

    return uses_cuda_graphs(config.compile.mode, layout.device.type)


def check_cuda_graphs(
    config: RecipeConfig, layout: RankLayout, *, has_routers: bool = False
) -> None:
    """Validate that CUDA graphs may overwrite outputs of an earlier forward pass. Raises :class:`RecipeError`.

    *has_routers*: whether the loss of a mixture of experts is added.
    """
    accumulates = num_micro_batches(config, layout.dp_size) > 1
    scope = balancing_scope(config.model)
    if layout.in_stages:
        reason = "several micro-batches are in progress on a pipeline stage"
    elif accumulates and config.distributed.defer_gradient_sync:
        reason = "deferred gradients of several micro-batches are kept"
    elif accumulates and has_routers and scope == "global_batch":
        reason = "the routers' choices of several micro-batches are kept (model.router_aux_loss)"
    else:
        return
    raise RecipeError(
        f"this mode uses CUDA graphs, which overwrite their outputs, and {reason}",
        where="compile.mode",
        value=config.compile.mode,
        hint="remove the key",
    )
