"""Building a model for training or for inference next to one: from files or a configuration to this rank's shards."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from automodel_ckpt.checkpoint.module_tensors import (
    StoredLayout,
    record_complete_tensors,
    set_stored_layout,
    stored_layout,
)
from automodel_ckpt.config.schema import (
    CompileConfig,
    DistributedConfig,
    ModelConfig,
    RecipeConfig,
    Target,
)
from automodel_ckpt.config.targets import build
from automodel_ckpt.data.image_collate import ImageTextCollator
from automodel_ckpt.data.row_widths import RowWidths, WidenedRows
from automodel_ckpt.distributed.agree import sum_over_ranks
from automodel_ckpt.distributed.context_parallel import (
    ContextParallel,
    check_context_heads,
    check_context_parallel,
)
from automodel_ckpt.distributed.expert_parallel import check_experts
from automodel_ckpt.distributed.mesh import RankLayout
from automodel_ckpt.distributed.mesh_sizes import choose_strategy
from automodel_ckpt.distributed.parallelize import (
    Parallelism,
    compute_context,
    decoder_layers,
    parallelize,
    reshard,
)
from automodel_ckpt.distributed.tensor_parallel import check_heads
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.activation_memory import (
    HostActivations,
    check_offload,
    checkpoint_activations,
)
from automodel_ckpt.models.adapter import Adapted, why_whole, widen_trained
from automodel_ckpt.models.build import (
    check_attention,
    check_complete,
    check_context,
    check_task,
    check_trained_types,
    check_vocabulary,
    freeze,
    load_model_config,
)
from automodel_ckpt.models.compiling import compile_layers, num_row_widths, uses_cuda_graphs
from automodel_ckpt.models.fake_quantization import FakeQuantization
from automodel_ckpt.models.flop_count import FlopCount, count_flops
from automodel_ckpt.models.forward import accepts_use_cache, model_without_adapters
from automodel_ckpt.models.fp8 import convert_to_fp8
from automodel_ckpt.models.hf_names import tensor_names_in
from automodel_ckpt.models.loss_head import LossHead, ModuleLossHead
from automodel_ckpt.models.loss_head_probe import install_loss_head, output_layer
from automodel_ckpt.models.mtp import MultiTokenPrediction, mtp_of
from automodel_ckpt.models.mtp_families import MtpPlan, plan_mtp
from automodel_ckpt.models.neftune import EmbeddingNoise
from automodel_ckpt.models.pipeline_stage import check_stages
from automodel_ckpt.models.quantize import check_not_quantized
from automodel_ckpt.models.repository import base_directory
from automodel_ckpt.models.routers import (
    RouterSettings,
    check_router_loss,
    check_stages_with_routers,
    router_settings,
)
from automodel_ckpt.models.task_head import (
    SEQUENCE_CLASSIFICATION,
    expected_differences,
    head_modules,
)
from automodel_ckpt.models.vision import image_token_ids
from automodel_ckpt.models.vocabulary import (
    num_embeddings,
    resize_vocabulary,
    set_size,
    vocabulary_names,
    wanted_size,
)
from automodel_ckpt.recipes.adapters import adapt, fresh_base, lora_of, quantization, with_copies
from automodel_ckpt.recipes.context_parallel import divide_rows
from automodel_ckpt.recipes.deferred_model import DeferredModel, build_deferred, layout_in_files
from automodel_ckpt.recipes.image_rows import choose_image_rows
from automodel_ckpt.recipes.init_from import verify_base
from automodel_ckpt.recipes.pipeline import FromTokens, PipelineStage, log_idle_share, split_stages
from automodel_ckpt.recipes.precision import (
    describe_precision,
    float32_precision,
    parameter_type,
    resolve_precision,
)
from automodel_ckpt.recipes.repository import repository_options
from automodel_ckpt.recipes.row_sharing import Rows, choose_row_layout
from automodel_ckpt.training.router_loss import RouterLoss
from automodel_ckpt.units import counted

log = logging.getLogger("automodel_ckpt")

_FEATURES = "FEATURE_EXTRACTION"
"""peft's name of the task of a model without an output layer."""


@dataclass(frozen=True, slots=True)
class Trainable:
    """This rank's shards of a model, or of one pipeline stage, and how its forward pass is called."""

    model: nn.Module
    forward_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of each forward pass besides the rows."""
    compute: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The context of each forward pass, which sets the dtype that all ranks compute in."""
    row_layout: Rows | None = None
    """How samples share rows; None: each sample is padded to the longest."""
    overwrites_outputs: bool = False
    """Whether layers run as CUDA graphs, which overwrite their earlier outputs and gradients."""
    loss_head: LossHead | ModuleLossHead | None = None
    """The output layer, if it computes the loss; None: the loss is computed from full logits."""
    all_up_to: int = 0
    """Number of positions in a micro-batch up to which the loss head takes those without a label too."""
    context: ContextParallel | None = None
    """How context parallel ranks divide rows; None: rows are not divided."""
    stage: PipelineStage | None = None
    """This rank's stage of a pipeline; None: the model is complete."""
    router_loss: RouterLoss | None = None
    """The load balancing loss of a mixture of experts; None: the model has none, or the recipe switches it off."""
    embedding_noise: EmbeddingNoise | None = None
    """The noise that training adds to embeddings (``model.neftune_alpha``); None: there is none."""
    mtp: MultiTokenPrediction | None = None
    """The layers that predict further tokens; None without a section ``model.mtp``."""
    adapted: Adapted | None = None
    """The adapters and their description; None without a ``peft`` section."""
    fake_quantization: FakeQuantization | None = None
    """The layers that compute with rounded values; None without a ``qat`` section."""
    resized: tuple[str, ...] = ()
    """Names in files of the parameters that ``model.vocab_size`` gives another number of rows."""
    has_task_head: bool = False
    """Whether the model has a classification head, which its pretrained files may lack."""
    other_head: tuple[str, ...] = ()
    """Names of tensors in which exports and the pretrained files differ because they have different heads."""
    flop_count: FlopCount | None = None
    """The operations of a training step of the complete model; None if they are unknown."""
    summary: str = ""
    """The class and size of the model and how ranks share it, for the log."""
    precision: str = ""
    """The data types of the weights and of the computation, for the log."""

    @property
    def stored_layout(self) -> StoredLayout:
        """How checkpoints store the tensors of the model."""
        return stored_layout(self.model)

    def forward(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        """Call the model with *inputs* on its device, in the dtype that all ranks compute in; returns its output."""
        with self.compute():
            return self.model(**inputs, **self.forward_options)


def build_trainable(
    config: RecipeConfig,
    layout: RankLayout,
    *,
    auto_class: Any,
    task_type: str | None = None,
    preprocessor: Any = None,
    model_config: PreTrainedConfig | None = None,
    shares_rows: bool = False,
    packs_images: bool = False,
    is_trained: bool = True,
    is_dry_run: bool = False,
) -> Trainable:
    """Build the model that the sections ``model``, ``peft``, ``distributed`` and ``compile`` of *config* describe.

    A collective. Call it once for each model of a run: for another one (a reference, a teacher, a reward model) pass
    ``dataclasses.replace(config, model=..., peft=...)``. A model that is not trained is frozen and in evaluation mode.

    Args:
        config: The recipe; it is not changed.
        layout: The ranks that share the model.
        auto_class: The class of transformers whose ``from_pretrained`` and ``from_config`` make the model.
        task_type: peft's name of the task; None if peft has no class of models for it.
        preprocessor: The tokenizer or processor; None if there is none.
        model_config: What :func:`read_model_config` returned for ``config.model``; None: it is read here.
        shares_rows: Whether samples may share rows without padding, if the model supports it.
        packs_images: Whether the samples of ``packed_sequence`` have images, which *preprocessor* prepares.
        is_trained: Whether the parameters get gradients, as far as ``model.freeze`` and ``peft`` allow.
        is_dry_run: Whether the model stays on the meta device, complete and without values, to be counted.

    Raises :class:`RecipeError` for what the model or the ranks do not support, on all ranks, and
    :class:`CheckpointUnusable` for damaged files of the base.
    """
    # Another model of a run is described by values of a recipe file too, and so by null and auto.
    config = resolve_precision(config, layout.sizes, layout.device.type)
    if model_config is None:
        model_config = read_model_config(
            config, layout, auto_class=auto_class, preprocessor=preprocessor
        )
    keeps_masters = _keeps_masters(config)
    config = _with_parameter_type(config, model_config, layout, is_trained=is_trained)
    builder = _TrainableBuilder(
        config,
        layout,
        auto_class=auto_class,
        task_type=task_type,
        preprocessor=preprocessor,
        model_config=model_config,
        shares_rows=shares_rows,
        packs_images=packs_images,
        is_trained=is_trained,
        is_dry_run=is_dry_run,
        keeps_masters=keeps_masters,
    )
    return builder.build()


def _keeps_masters(config: RecipeConfig) -> bool:
    """Whether parameters that are trained beside a base in 16 bits get float32: not if the recipe gives their type."""
    section, peft = config.model, config.peft
    if isinstance(section, Target) or section.dtype is not None:
        return False
    return peft is not None and peft.dtype == "float32"


def _with_parameter_type(
    config: RecipeConfig,
    model_config: PreTrainedConfig | None,
    layout: RankLayout,
    *,
    is_trained: bool,
) -> RecipeConfig:
    """Return *config* with a ``model.dtype`` for this device."""
    if isinstance(config.model, Target):
        return config
    dtype = parameter_type(
        config.model,
        model_config,
        device_type=layout.device.type,
        is_frozen=config.peft is not None or not is_trained,
    )
    return replace(config, model=replace(config.model, dtype=dtype))


def read_model_config(
    config: RecipeConfig, layout: RankLayout, *, auto_class: Any, preprocessor: Any
) -> PreTrainedConfig | None:
    """Read the transformers configuration of ``config.model``; None for a model by ``_target_``.

    Raises :class:`RecipeError` if it does not fit the tokenizer, the data or the device mesh.
    """
    section = config.model
    if isinstance(section, Target):
        return None
    tokenizer = text_tokenizer(preprocessor)
    found = load_model_config(
        from_pretrained=section.from_pretrained,
        from_config=section.from_config,
        tokenizer=tokenizer,
        processor=preprocessor,
        overrides=section.config_overrides,
        repository=repository_options(section),
        auto_class=auto_class,
    )
    check_task(found, auto_class)
    size = wanted_size(section.vocab_size, tokenizer)
    if size is not None and section.from_config is not None:
        set_size(found, size)
    check_vocabulary(found, tokenizer, size=size)
    sizes = layout.sizes
    check_heads(found, sizes.tp)
    check_context_heads(found, sizes.cp, sizes.tp)
    datasets = {"dataset": config.dataset, "validation_dataset": config.validation_dataset}
    for name, section_of_set in config.validation_datasets.items():
        datasets[f"validation_datasets.{name}"] = section_of_set
    for name, dataset in datasets.items():
        seq_length = dataset.kwargs.get("seq_length") if dataset is not None else None
        if seq_length is not None:
            check_context(found, int(seq_length), f"{name}.seq_length")
    return found


def within_context(section: Target, model_config: PreTrainedConfig | None) -> Target:
    """Return the section of a data set with ``seq_length`` null replaced by the length of the model's context.

    If the model states no limit, or *model_config* is None, the section is returned unchanged: null is then no limit.
    """
    is_null = "seq_length" in section.kwargs and section.kwargs["seq_length"] is None
    if not is_null or model_config is None:
        return section
    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int):
        return section
    return replace(section, kwargs=section.kwargs | {"seq_length": limit})


def text_tokenizer(preprocessor: Any) -> Any:
    """The tokenizer, also of a processor; None if there is none."""
    return getattr(preprocessor, "tokenizer", preprocessor)


def parallelism(section: DistributedConfig) -> Parallelism:
    """The ``distributed`` section without the sizes of the mesh and the plan."""
    return Parallelism(
        strategy=section.strategy,
        reshard_after_forward=section.reshard_after_forward,
        compute_dtype=compute_dtype(section),
        cpu_offload=section.cpu_offload,
        defer_gradient_sync=section.defer_gradient_sync,
        sequence_parallel=section.sequence_parallel,
    )


def compute_dtype(section: DistributedConfig) -> torch.dtype | None:
    """The data type of forward and backward passes; None: that of the parameters, also for ``auto`` before
    :func:`~automodel_ckpt.recipes.precision.resolve_precision`."""
    if section.mixed_precision in (None, "none", "auto"):
        return None
    return getattr(torch, section.mixed_precision)  # type: ignore[no-any-return]


def activation_mode(section: ModelConfig | Target) -> str:
    """Which activations are recomputed: ``full``, ``selective`` or ``offload``; empty: none."""
    given = section.activation_checkpointing if isinstance(section, ModelConfig) else False
    if isinstance(given, str):
        return given
    return "full" if given else ""


def row_multiple(config: RecipeConfig, layout: RankLayout) -> int:
    """Rows are padded to a multiple of this many tokens, so that ranks can divide them along the sequence."""
    num_parts = layout.num_row_parts(sequence_parallel=config.distributed.sequence_parallel)
    return math.lcm(config.dataloader.pad_to_multiple_of or 1, num_parts)


@dataclass(frozen=True, slots=True)
class _Changed:
    """An unsharded model after the changes that the recipe makes to it."""

    deferred: DeferredModel
    adapted: Adapted | None = None
    resized: tuple[str, ...] = ()
    other_head: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sharded:
    """A model with this rank's values, the context of its forward pass, and its pipeline stage if it has one."""

    model: nn.Module
    compute: Callable[[], AbstractContextManager[Any]]
    stage: PipelineStage | None = None


@dataclass(frozen=True, slots=True)
class _TrainableBuilder:
    """The inputs of :func:`build_trainable`. No method changes them."""

    config: RecipeConfig
    layout: RankLayout
    auto_class: Any
    task_type: str | None
    preprocessor: Any
    model_config: PreTrainedConfig | None
    shares_rows: bool
    packs_images: bool
    is_trained: bool
    is_dry_run: bool
    keeps_masters: bool
    """Whether parameters that are trained beside a base in 16 bits get float32."""

    def build(self) -> Trainable:
        """Build the model, change it, shard it, and probe what it supports."""
        changed = self._change(self._unsharded())
        model = changed.deferred.model
        if self.is_trained:
            check_trained_types(model)
        options = self._forward_options(model)
        router = self._router_settings(model)
        if router is None and router_settings(model) is not None:
            # Otherwise the model would compute router logits that nothing uses.
            options["output_router_logits"] = False
        self._check_mesh(model)
        built = Trainable(
            model,
            options,
            adapted=changed.adapted,
            fake_quantization=self._fake_quantization(model),
            resized=changed.resized,
            has_task_head=self._has_task_head,
            other_head=changed.other_head,
            # Before the model is divided: this rank's shards have other shapes.
            flop_count=count_flops(model, decoder_layers(model)),
            summary=self._summary(model),
            precision=self._precision(model),
        )
        if self.is_dry_run:
            return built
        check_attention(model, self.layout.device)
        if self._offloads():
            check_offload(self.layout.device)
        compiling = self.config.compile
        device_type = self.layout.device.type
        has_graphs = compiling.enabled and uses_cuda_graphs(compiling.mode, device_type)
        if has_graphs and self.is_trained:
            check_cuda_graphs(self.config, self.layout, has_routers=router is not None)
        sharded = shard(changed.deferred, self.config, self.layout)
        compute = sharded.compute
        if self._offloads():
            compute = _offloading(compute, HostActivations(self.layout.device))
        if has_graphs:
            compute = _marking_steps(compute)
        built = replace(
            built,
            model=sharded.model,
            compute=compute,
            stage=sharded.stage,
            overwrites_outputs=has_graphs,
        )
        # The unsharded object is probed: sharding changed it in place, and a DDP wrapper would reduce gradients.
        probed = self._probed(built, model, router)
        noise = self._embedding_noise(model, probed.stage)
        return replace(probed, embedding_noise=noise, mtp=self._installed_mtp(model, probed))

    def _check_mesh(self, model: nn.Module) -> None:
        """Raise :class:`RecipeError` if *model* cannot be divided over the dimensions of the device mesh."""
        if self.layout.in_stages:
            section = self.config.distributed
            if self._has_task_head:
                raise RecipeError(
                    "a model with a classification head cannot be divided into pipeline stages",
                    where="distributed.pp_size",
                    value=self.layout.sizes.pp,
                    hint="remove pp_size: fsdp2 shards the model over the same ranks",
                )
            check_stages(model, self.layout.sizes.pp * section.stages_per_rank)
        if self.layout.sizes.cp > 1:
            check_context_parallel(model)
        if self.layout.sizes.ep > 1:
            check_experts(model, self.layout)

    # ---------------------------------------------------------------- the unsharded model

    def _unsharded(self) -> DeferredModel:
        section = self.config.model
        if isinstance(section, Target):
            made = build(section)
            check_complete(made)
            return DeferredModel(made)
        assert self.model_config is not None
        base = self._base()
        if base is not None:
            # A dry run reads no weights.
            level = "size" if self.is_dry_run else self.config.checkpoint.verify
            verify_base(base, level, self.layout, self.layout.gloo_group, section.revision)
        peft = self.config.peft
        return build_deferred(
            section,
            self.model_config,
            base=base,
            auto_class=self.auto_class,
            seed=self.config.seed,
            group=self.layout.gloo_group,
            vocab_size=wanted_size(section.vocab_size, text_tokenizer(self.preprocessor)),
            needs_values=why_whole(lora_of(peft)) if peft is not None else "",
            loading=quantization(self.config, self.layout),
            mtp=self._mtp_plan(section, base),
            # A model that is not trained needs the head of its files.
            allow_new_head=self._has_task_head and self.is_trained,
        )

    @property
    def _has_task_head(self) -> bool:
        return self.task_type == SEQUENCE_CLASSIFICATION

    def _mtp_plan(self, section: ModelConfig, base: str | None) -> MtpPlan | None:
        """What the section ``model.mtp`` asks for; None without it. A model that is not trained gets no such layers."""
        if section.mtp is None or not self.is_trained:
            return None
        if self._has_task_head:
            raise RecipeError(
                "a model with a classification head predicts no tokens",
                where="model.mtp",
                value="a section",
                hint="remove model.mtp",
            )
        if self.packs_images and self.config.packed_sequence is not None:
            raise RecipeError(
                "multi-token prediction does not support packed samples with images",
                where="model.mtp",
                value="packed_sequence",
                hint="remove packed_sequence, or model.mtp",
            )
        assert self.model_config is not None
        return plan_mtp(
            self.model_config,
            num_depths=section.mtp.num_depths,
            repeat_layer=section.mtp.repeat_layer,
            factor=section.mtp.loss_scaling_factor,
            is_new=base is None or section.mtp.weights == "new",
        )

    def _base(self) -> str | None:
        """The directory or Hub name of the pretrained weights. None for fresh weights.

        ``peft.base_dir`` is created first if it does not exist, except in a dry run.
        """
        section, peft = self.config.model, self.config.peft
        assert not isinstance(section, Target)
        if peft is None or peft.base_dir is None:
            return section.from_pretrained
        assert self.model_config is not None
        if self.is_dry_run and not Path(peft.base_dir).expanduser().exists():
            # A dry run writes nothing: the base would have the shapes of model.from_config.
            return None
        fresh_base(
            self.config,
            self.model_config,
            auto_class=self.auto_class,
            preprocessor=self.preprocessor,
            layout=self.layout,
        )
        return peft.base_dir

    def _change(self, deferred: DeferredModel) -> _Changed:
        """Resize the vocabulary, record the stored layout, and add adapters or freeze parameters."""
        section, model = self.config.model, deferred.model
        if isinstance(section, Target):
            if self.is_trained:
                freeze(model, [])  # raises if the model has nothing to train
            else:
                _freeze_all(model)
            return _Changed(deferred)
        num_base_rows = self._num_base_rows(model)
        resized = self._resize(model, section)
        directory = None
        if section.from_pretrained is not None:
            directory = base_directory(section.from_pretrained, section.revision)
        # Before adapters and sharding, which change names and shapes.
        names = layout_in_files(model, directory)
        set_stored_layout(model, names)
        resized = tuple(names.name_of(name) for name in resized)
        other_head: tuple[str, ...] = ()
        if self._has_task_head and directory is not None:
            other_head = expected_differences(model, tensor_names_in(directory))
        adapted = None
        # Before adapters, which compute in their own dtype around the layers of the base.
        self._use_fp8(model)
        if self.config.peft is not None:
            head = head_modules(model) if self._has_task_head else ()
            adapted = adapt(model, self.config.peft, num_base_rows, self.task_type, head=head)
            deferred = with_copies(deferred, adapted.model)
            if self.keeps_masters:
                widen_trained(adapted.model)
        else:
            check_not_quantized(model)
            if self.is_trained:
                freeze(model, section.freeze, section.freeze_if_present)
            if names.rows:
                # Each rank stores its own experts; with this, all ranks know the names of all experts.
                record_complete_tensors(model)
        if not self.is_trained:
            _freeze_all(deferred.model)
        elif section.activation_checkpointing:
            layers = decoder_layers(deferred.model)
            mode = activation_mode(section)
            checkpoint_activations(deferred.model, mode, layers)
            log.info("activations of %s are recomputed (%s)", counted(len(layers), "layer"), mode)
        return _Changed(deferred, adapted, resized, other_head)

    def _offloads(self) -> bool:
        section = self.config.model
        return self.is_trained and activation_mode(section) == "offload"

    def _num_base_rows(self, model: nn.Module) -> int | None:
        """Rows of the embedding before ``model.vocab_size`` changes it."""
        assert self.model_config is not None
        configured = getattr(self.model_config.get_text_config(), "vocab_size", None)
        return configured or num_embeddings(model)

    def _resize(self, model: nn.Module, section: ModelConfig) -> tuple[str, ...]:
        """Apply ``model.vocab_size``; returns the FQNs of the parameters that it concerns."""
        size = wanted_size(section.vocab_size, text_tokenizer(self.preprocessor))
        if size is None:
            return ()
        names = tuple(vocabulary_names(model))
        if section.from_pretrained is not None:
            # A model on the meta device has this size already; one with values has that of its files.
            resize_vocabulary(model, size, section.new_tokens)
        return names

    def _forward_options(self, model: nn.Module) -> dict[str, Any]:
        # A cache of keys and values serves generation only, and costs time and memory in each step. With one, models
        # of transformers do not look for the samples of a packed row.
        return {"use_cache": False} if accepts_use_cache(model) else {}

    def _installed_mtp(self, model: nn.Module, built: Trainable) -> MultiTokenPrediction | None:
        """Install the layers that predict further tokens in the sharded *model*, and return them; None without any."""
        inner = model_without_adapters(model)
        layers = mtp_of(inner)
        if layers is None:
            return None
        output = output_layer(model)
        assert output is not None
        part_of = built.context.slice_of if built.context is not None else None
        layers.install(inner, output, part_of)
        log.info(
            "the loss of %d further tokens is added with the factor %g (model.mtp)",
            layers.num_depths,
            layers.factor,
        )
        return layers

    def _use_fp8(self, model: nn.Module) -> None:
        """Let linear layers of *model* compute in FP8, if the recipe says so; before the model is sharded.

        A dry run leaves it out: it needs neither torchao nor a GPU.
        """
        section = self.config.fp8
        if section is None or self.is_dry_run or not self.is_trained:
            return
        convert_to_fp8(
            model,
            recipe=section.recipe,
            exclude=section.exclude,
            emulate=section.emulate,
            device=self.layout.device,
        )

    def _fake_quantization(self, model: nn.Module) -> FakeQuantization | None:
        section = self.config.qat
        if section is None or not self.is_trained:
            return None
        return FakeQuantization(model, section.scheme, section.group_size, section.start_step)

    def _router_settings(self, model: nn.Module) -> RouterSettings | None:
        """The settings of the router's loss; None for a model without one, or if the recipe switches it off.

        Raises :class:`RecipeError` for pipeline stages, and for ``micro_batch`` with a model that has no such loss.
        """
        settings, section = router_settings(model), self.config.model
        over = section.router_aux_loss if isinstance(section, ModelConfig) else True
        if settings is None:
            if over == "micro_batch":
                raise RecipeError(
                    "router_aux_loss has no effect: this model computes no router logits",
                    where="model.router_aux_loss",
                    value=over,
                    hint="set output_router_logits: true in the model's config, or remove the key",
                )
            return None
        if not over or not self.is_trained:
            return None
        if self._has_task_head:
            log.info(
                "no load balancing loss: models with a classification head return no router logits"
            )
            return None
        check_stages_with_routers(self.layout.sizes.pp)
        return settings

    def _summary(self, model: nn.Module) -> str:
        num_all, num_trained = 0, 0
        for parameter in model.parameters():
            num_all += parameter.numel()
            if parameter.requires_grad:
                num_trained += parameter.numel()
        text = f"{type(model).__name__} with {num_all:,} parameters"
        if num_trained != num_all:
            text += f", {num_trained:,} of them trained"
        sizes = self.layout.sizes
        text += "; 1 rank" if sizes.world == 1 else f"; {sizes.world} ranks"
        text += f", {choose_strategy(self.config.distributed.strategy, sizes)}"
        if max(sizes.dp_replicate, sizes.tp, sizes.pp, sizes.cp, sizes.ep) > 1:
            text += f" ({sizes})"
        return text

    def _precision(self, model: nn.Module) -> str:
        section, device_type = self.config.distributed, self.layout.device.type
        return describe_precision(
            model,
            strategy=choose_strategy(section.strategy, self.layout.sizes),
            compute_type=compute_dtype(section),
            products=float32_precision(self.config, device_type) if device_type == "cuda" else None,
        )

    # ---------------------------------------------------------------- probing

    def _probed(
        self, built: Trainable, model: nn.Module, router: RouterSettings | None
    ) -> Trainable:
        """Find out what the sharded *model* supports by forward passes of a few tokens. A collective."""
        if router is not None:
            router_loss = self._build_router_loss(model, router, built.forward_options)
            built = replace(built, router_loss=router_loss)
        probe_model = _probe_model(model, built.stage)
        if self.shares_rows:
            row_layout = choose_row_layout(
                model,
                probe_model,
                self.config,
                self.layout,
                built.forward_options,
                built.compute,
                row_multiple=row_multiple(self.config, self.layout),
                hidden_size=self._hidden_size(),
                marks_tokens=router is not None,
            )
            built = replace(built, row_layout=row_layout)
        if self.packs_images and self.config.packed_sequence is not None:
            built = replace(built, row_layout=self._image_rows(built, probe_model, router))
        predicts_tokens = not self._has_task_head and self.task_type != _FEATURES
        if predicts_tokens and self.config.loss_fn is None and self.layout.is_last_stage:
            head = install_loss_head(
                probe_model,
                built.forward_options,
                row_multiple(self.config, self.layout),
                self.layout.device,
            )
            if head is not None:
                # Read here: its value depends on the weight's type, which sharding changes back after the probes.
                built = replace(built, loss_head=head, all_up_to=head.all_up_to)
        if self.layout.sizes.cp > 1:
            context = divide_rows(model, probe_model, self.layout, built.forward_options)
            built = replace(built, context=context)
        if self.config.compile.enabled:
            built = replace(built, row_layout=self._widened(built.row_layout))
        # The probes left the parameters gathered.
        reshard(built.model)
        if not self.is_trained:
            built.model.eval()
        return built

    def _widened(self, rows: Rows | None) -> Rows | None:
        """Let rows have few widths, as ``compile.row_widths`` asks."""
        section, steps = self.config.compile, self.config.step_scheduler
        count = num_row_widths(section.row_widths, section.dynamic, self.layout.device.type)
        longest = self._longest_row()
        if count is None or longest is None or self.packs_images:
            return rows
        if getattr(rows, "one_row", False):
            longest *= steps.local_batch_size
        widths = RowWidths(longest, count, row_multiple(self.config, self.layout))
        log.info(
            "rows are padded to one of %d widths up to %d tokens (compile.row_widths)",
            len(widths.widths),
            widths.widths[-1],
        )
        return WidenedRows(rows, widths)

    def _longest_row(self) -> int | None:
        """The number of tokens of the longest sample or pack that the recipe or the model allows; None: unknown."""
        if self.config.packed_sequence is not None:
            return self.config.packed_sequence.size
        given = self.config.dataset.kwargs.get("seq_length") if self.config.dataset else None
        if given is None and self.model_config is not None:
            text = self.model_config.get_text_config()
            given = getattr(text, "max_position_embeddings", None)
        return None if given is None else int(given)

    def _embedding_noise(
        self, model: nn.Module, stage: PipelineStage | None
    ) -> EmbeddingNoise | None:
        """Add ``model.neftune_alpha`` to the sharded *model*; None without it, and on later pipeline stages."""
        section = self.config.model
        alpha = section.neftune_alpha if isinstance(section, ModelConfig) else None
        is_later_stage = stage is not None and self.layout.pp_rank > 0
        if alpha is None or not self.is_trained or is_later_stage:
            return None
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        log.info("noise is added to embeddings in training, alpha %g (model.neftune_alpha)", alpha)
        return EmbeddingNoise(embedding, alpha)

    def _image_rows(
        self, built: Trainable, probe_model: nn.Module, router: RouterSettings | None
    ) -> Rows:
        ids = image_token_ids(self.model_config, self.preprocessor)
        return choose_image_rows(
            probe_model,
            ImageTextCollator(self.preprocessor, ids),
            self.layout,
            built.forward_options,
            built.compute,
            self.config,
            row_multiple=row_multiple(self.config, self.layout),
            marks_tokens=router is not None,
        )

    def _build_router_loss(
        self, model: nn.Module, settings: RouterSettings, options: Mapping[str, Any]
    ) -> RouterLoss:
        section = self.config.model
        over = section.router_aux_loss if isinstance(section, ModelConfig) else True
        router_loss = RouterLoss(
            settings.coefficient,
            settings.top_k,
            "micro_batch" if over == "micro_batch" else "global_batch",
            sum_over_ranks=partial(sum_over_ranks, self.layout.gloo_group),
            counts_here=self.layout.reports_loss,
        )
        multiple = row_multiple(self.config, self.layout)
        check_router_loss(model, router_loss.of_logits, options, multiple, self.layout.device)
        log.info(
            "the router's load balancing loss is added with the coefficient %g, over each %s (model.router_aux_loss)",
            settings.coefficient,
            router_loss.over.replace("_", " "),
        )
        return router_loss

    def _hidden_size(self) -> int:
        text = self.model_config and self.model_config.get_text_config()
        return getattr(text, "hidden_size", 1024)


def shard(deferred: DeferredModel, config: RecipeConfig, layout: RankLayout) -> Sharded:
    """Leave this rank's shards of a model in place, with their values, as the section ``distributed`` asks.

    Decoder layers are compiled before, as ``compile`` asks. A collective. Raises :class:`RecipeError` for what this
    model does not support.
    """
    model, section = deferred.model, config.distributed
    plan = build(section.tp_plan, model=model) if section.tp_plan is not None else None
    how = replace(parallelism(section), tp_plan=plan)
    strategy = choose_strategy(how.strategy, layout.sizes)
    compute = compute_context(strategy, layout.device, how.compute_dtype)
    stages = None
    if layout.in_stages:
        # Under autocast, residual additions keep the hidden states in the weights' dtype.
        hidden_dtype = how.compute_dtype if strategy == "fsdp2" else None
        stages = split_stages(model, layout, plan, hidden_dtype, section.stages_per_rank)
        how = replace(how, tp_plan=stages.tp_plan)
    if config.compile.enabled:
        # Layer by layer and in place: torch.compile(model) would add `_orig_mod.` to all names.
        _compile(model, config.compile, layout.device)
    mesh = stages.mesh if stages is not None else None
    sharded = parallelize(model, layout, how, deferred.materialise, mesh)
    if stages is None:
        return Sharded(sharded, compute)
    stage = PipelineStage(sharded, layout, stages, section.pp_schedule)
    steps = config.step_scheduler
    num_micro_batches = steps.global_batch_size // (steps.local_batch_size * layout.dp_size)
    log_idle_share(num_micro_batches, layout, section.stages_per_rank)
    return Sharded(sharded, compute, stage)


def _offloading(
    compute: Callable[[], AbstractContextManager[Any]], host: HostActivations
) -> Callable[[], AbstractContextManager[Any]]:
    """The context *compute* of a forward pass, in which activations are moved to the host."""

    @contextmanager
    def both() -> Iterator[None]:
        with compute(), host.saving():
            yield

    return both


def _compile(model: nn.Module, section: CompileConfig, device: torch.device) -> None:
    compile_layers(
        decoder_layers(model),
        backend=section.backend,
        mode=section.mode,
        fullgraph=section.fullgraph,
        dynamic=section.dynamic,
        device=device,
        num_widths=num_row_widths(section.row_widths, section.dynamic, device.type),
    )


def check_cuda_graphs(
    config: RecipeConfig, layout: RankLayout, *, has_routers: bool = False
) -> None:
    """Validate that CUDA graphs may overwrite outputs of an earlier forward pass. Raises :class:`RecipeError`.

    *has_routers*: whether the loss of a mixture of experts is added.
    """
    steps = config.step_scheduler
    num_micro_batches = steps.global_batch_size // (steps.local_batch_size * layout.dp_size)
    if layout.in_stages:
        reason = "several micro-batches are in progress on a pipeline stage"
    elif num_micro_batches > 1 and config.distributed.defer_gradient_sync:
        reason = "deferred gradients of several micro-batches are kept"
    elif num_micro_batches > 1 and has_routers and _routes_global_batch(config.model):
        reason = "the routers' choices of several micro-batches are kept (model.router_aux_loss)"
    else:
        return
    raise RecipeError(
        f"this mode uses CUDA graphs, which overwrite their outputs, and {reason}",
        where="compile.mode",
        value=config.compile.mode,
        hint="remove compile.mode, or set it to max-autotune-no-cudagraphs",
    )


def _routes_global_batch(section: ModelConfig | Target) -> bool:
    over = section.router_aux_loss if isinstance(section, ModelConfig) else True
    return over in (True, "global_batch")


def _marking_steps(
    compute: Callable[[], AbstractContextManager[Any]],
) -> Callable[[], AbstractContextManager[Any]]:
    """The context *compute* of a forward pass, before which CUDA graphs may reuse the memory of earlier outputs."""

    def marked() -> AbstractContextManager[Any]:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return compute()

    return marked


def _probe_model(model: nn.Module, stage: PipelineStage | None) -> nn.Module:
    """A model that takes token ids, for probes; pipeline stages, most of which take hidden states, are wrapped."""
    return model if stage is None else FromTokens(model, stage)


def _freeze_all(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
