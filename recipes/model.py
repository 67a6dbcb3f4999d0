"""The model of a recipe: made from files or a configuration, changed as the recipe asks, shared out among the ranks."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from automodel_ckpt.checkpoint.module_tensors import keep_whole
from automodel_ckpt.config.schema import ModelConfig, Target
from automodel_ckpt.config.targets import build
from automodel_ckpt.distributed.agree import sum_over_ranks
from automodel_ckpt.distributed.context_parallel import check_context_parallel
from automodel_ckpt.distributed.mesh_sizes import choose_strategy
from automodel_ckpt.distributed.parallelize import (
    Materialise,
    Parallelism,
    compute_context,
    decoder_layers,
    parallelize,
    reshard,
)
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.adapter import why_whole
from automodel_ckpt.models.build import (
    base_directory,
    check_attention,
    check_complete,
    check_trained_types,
    checkpoint_activations,
    freeze,
)
from automodel_ckpt.models.compiling import compile_layers
from automodel_ckpt.models.loss_head import LossOf, install_loss_head
from automodel_ckpt.models.pipeline_stage import check_stages
from automodel_ckpt.models.probe import forward_parameters
from automodel_ckpt.models.quantize import check_not_quantized
from automodel_ckpt.models.routers import (
    RouterSettings,
    check_router_loss,
    check_stages_with_routers,
    router_settings,
)
from automodel_ckpt.models.vocabulary import (
    num_embeddings,
    resize_vocabulary,
    vocabulary_names,
    wanted_size,
)
from automodel_ckpt.recipes.adapters import adapt, fresh_base, lora_of, quantization, with_copies
from automodel_ckpt.recipes.blueprint import Blueprint, draw_up, hold_names
from automodel_ckpt.recipes.context_parallel import cut_rows
from automodel_ckpt.recipes.init_from import verify_base
from automodel_ckpt.recipes.pipeline import FromTokens, Staged, cut, log_idle_share
from automodel_ckpt.recipes.steps import Steps
from automodel_ckpt.recipes.trainable import Rows
from automodel_ckpt.training.router_loss import RouterLoss

log = logging.getLogger("automodel_ckpt")


class ModelBuilding(Steps):
    """Makes ``model``, and what the steps have to know of it."""

    auto_class: ClassVar[Any]
    """The class of transformers whose ``from_pretrained`` and ``from_config`` make the model."""
    task_type: ClassVar[str | None] = None
    """peft's name of the task; None where peft has no class of models for it."""
    only_planned: bool = False
    """Whether the model is only counted, for ``--dry-run`` (recipes.planning): it stays without values."""
    preprocessor: Any
    """The tokenizer or processor, whose files an export carries along; None: there is none."""

    def build_model(self) -> nn.Module:
        """The model, frozen where asked, with this rank's share of the parameters."""
        blueprint = self.draw_up()
        section = self.config.model
        if isinstance(section, ModelConfig):
            blueprint = self._changed(blueprint, section)
        else:
            freeze(blueprint.model, [])
        model = blueprint.model
        check_trained_types(model)
        # A cache of keys and values serves generation only; building it in each step costs.
        takes_use_cache = "use_cache" in forward_parameters(model)
        self.forward_options = {"use_cache": False} if takes_use_cache else {}
        router = self.router_settings(model)
        if self.layout.in_stages:
            check_stages(model, self.layout.sizes.pp)
        self.log_model(model)
        if self.layout.sizes.cp > 1:
            check_context_parallel(model)
        return model if self.only_planned else self._shared_out(blueprint, router)

    def router_settings(self, model: nn.Module) -> RouterSettings | None:
        """The settings of the router's loss; None for a model without one, or where ``model.router_aux_loss`` is false.

        Raises :class:`RecipeError` for pipeline stages, and for ``micro_batch`` with a model that has no such loss.
        """
        settings, section = router_settings(model), self.config.model
        if settings is None:
            if isinstance(section, ModelConfig) and section.router_aux_loss == "micro_batch":
                raise RecipeError(
                    "router_aux_loss has no effect: this model computes no router logits",
                    where="model.router_aux_loss",
                    value=section.router_aux_loss,
                    hint="set output_router_logits: true in the model's config, or remove the key",
                )
            return None
        if isinstance(section, ModelConfig) and not section.router_aux_loss:
            self.forward_options = {**self.forward_options, "output_router_logits": False}
            return None
        check_stages_with_routers(self.layout.sizes.pp)
        return settings

    def build_router_loss(self, model: nn.Module, settings: RouterSettings) -> RouterLoss:
        """The router's loss of a model whose config asks for it. A collective."""
        section = self.config.model
        over = section.router_aux_loss if isinstance(section, ModelConfig) else True
        router_loss = RouterLoss(
            settings.coefficient,
            settings.top_k,
            "micro_batch" if over == "micro_batch" else "global_batch",
            sum_over_ranks=partial(sum_over_ranks, self.layout.gloo_group),
            counts_here=self.layout.reports_loss,
        )
        check_router_loss(
            model,
            router_loss.of_logits,
            self.forward_options,
            self.row_multiple,
            self.layout.device,
        )
        log.info(
            "the router's load balancing loss is added with the coefficient %g, over each %s (model.router_aux_loss)",
            settings.coefficient,
            router_loss.over.replace("_", " "),
        )
        return router_loss

    def _changed(self, blueprint: Blueprint, section: ModelConfig) -> Blueprint:
        """A transformers model resized, named, with adapters or frozen layers, as the recipe asks."""
        model = blueprint.model
        num_base_rows = self.num_base_rows(model)
        self.resize(model, section)
        self.name_tensors(model, section)
        if self.config.peft is not None:
            self.adapted = adapt(model, self.config.peft, num_base_rows, self.task_type)
            blueprint = with_copies(blueprint, self.adapted.model)
        else:
            check_not_quantized(model)
            freeze(model, section.freeze)
            keep_whole(model)
        if section.activation_checkpointing:
            checkpoint_activations(blueprint.model)
        return blueprint

    def _shared_out(self, blueprint: Blueprint, router: RouterSettings | None) -> nn.Module:
        """The model with this rank's share of its values, and what a few tokens through it tell the steps."""
        model = blueprint.model
        check_attention(model, self.layout.device)
        shared = self.parallelize(model, blueprint.materialise)
        # These run the model on a few tokens, which all its ranks do together.
        if router is not None:
            self.router_loss = self.build_router_loss(model, router)
        self.row_layout = self.choose_row_layout(model)
        self.loss_of = self.choose_loss_head(model)
        if self.layout.sizes.cp > 1:
            self.context = cut_rows(model, self.layout, self.forward_options)
        reshard(shared)
        return shared

    def draw_up(self) -> Blueprint:
        """The model as it is before it is changed or shared out."""
        section = self.config.model
        if isinstance(section, Target):
            made = build(section)
            check_complete(made)
            return Blueprint(made)
        assert self.model_config is not None
        size, peft = wanted_size(section.vocab_size, self.text_tokenizer), self.config.peft
        base = self.prepare_base()
        if base is not None:
            level = "size" if self.only_planned else self.config.checkpoint.verify
            verify_base(base, level, self.layout, self.layout.gloo_group)
        return draw_up(
            replace(section, from_pretrained=base),
            self.model_config,
            auto_class=self.auto_class,
            seed=self.config.seed,
            group=self.layout.gloo_group,
            vocab_size=size,
            needs_values=why_whole(lora_of(peft)) if peft is not None else "",
            loading=quantization(self.config, self.layout),
        )

    @property
    def text_tokenizer(self) -> Any:
        """The tokenizer, that of a processor included; None: there is none."""
        return getattr(self.preprocessor, "tokenizer", self.preprocessor)

    def num_base_rows(self, model: nn.Module) -> int | None:
        """Rows of the embedding before ``model.vocab_size`` changes it."""
        assert self.model_config is not None
        return getattr(self.model_config.get_text_config(), "vocab_size", None) or num_embeddings(
            model
        )

    def resize(self, model: nn.Module, section: ModelConfig) -> None:
        """What ``model.vocab_size`` asks for; a pretrained model that is built whole has its own size until here."""
        size = wanted_size(section.vocab_size, self.text_tokenizer)
        self.vocabulary = vocabulary_names(model) if size is not None else []
        if size is not None and section.from_pretrained is not None:
            resize_vocabulary(model, size, section.new_tokens)

    def name_tensors(self, model: nn.Module, section: ModelConfig) -> None:
        """Tell checkpoints what to call the model's tensors: by the names of Hugging Face files."""
        directory = base_directory(section.from_pretrained) if section.from_pretrained else None
        names = hold_names(model, directory).names
        self.vocabulary = [names.get(name, name) for name in self.vocabulary]

    def prepare_base(self) -> str | None:
        """The directory or Hub name that the model's weights are read from, made first where the recipe says so; None
        for fresh weights."""
        section, peft = self.config.model, self.config.peft
        assert not isinstance(section, Target)
        if peft is None or peft.base_dir is None:
            return section.from_pretrained
        assert self.model_config is not None
        fresh_base(
            self.config,
            self.model_config,
            auto_class=self.auto_class,
            preprocessor=self.preprocessor,
            layout=self.layout,
        )
        return peft.base_dir

    def choose_row_layout(self, model: nn.Module) -> Rows | None:
        """How samples share rows; None: each is padded to the longest."""
        return None

    @property
    def parallelism(self) -> Parallelism:
        """The recipe's ``distributed`` section, but for the sizes: those are in the layout."""
        config = self.config.distributed
        return Parallelism(
            strategy=config.strategy,
            reshard_after_forward=config.reshard_after_forward,
            compute_dtype=getattr(torch, config.mixed_precision)
            if config.mixed_precision
            else None,
            cpu_offload=config.cpu_offload,
            sequence_parallel=config.sequence_parallel,
        )

    @property
    def row_multiple(self) -> int:
        """Rows are padded to a multiple of this many tokens, so that they can be cut along the sequence."""
        num_parts = self.layout.num_row_parts(
            sequence_parallel=self.config.distributed.sequence_parallel
        )
        return math.lcm(self.config.dataloader.pad_to_multiple_of or 1, num_parts)

    def parallelize(self, model: nn.Module, materialise: Materialise | None = None) -> nn.Module:
        """This rank's share of the model with its values, and the type that all ranks compute in."""
        plan = self.config.distributed.tp_plan
        how = replace(
            self.parallelism, tp_plan=build(plan, model=model) if plan is not None else None
        )
        strategy = choose_strategy(how.strategy, self.layout.sizes)
        if how.compute_dtype is not None:
            means = "the parameters gathered in it" if strategy == "fsdp2" else "autocast"
            kept, computed = (
                str(t).removeprefix("torch.")
                for t in (next(model.parameters()).dtype, how.compute_dtype)
            )
            log.info("computing in %s (%s); weights and optimizer in %s", computed, means, kept)
        self.computing = compute_context(strategy, self.layout.device, how.compute_dtype)
        gathered_in = how.compute_dtype if strategy == "fsdp2" else None
        made = cut(model, self.layout, how.tp_plan, gathered_in) if self.layout.in_stages else None
        if self.config.compile.enabled:
            self.compile(model)
        if made is None:
            return parallelize(model, self.layout, how, materialise)
        shared = parallelize(
            model, self.layout, replace(how, tp_plan=made.tp_plan), materialise, made.mesh
        )
        self.staged = Staged(shared, self.layout, made, self.config.distributed.pp_schedule)
        steps = self.config.step_scheduler
        log_idle_share(
            steps.global_batch_size // (steps.local_batch_size * self.layout.dp_size), self.layout
        )
        return shared

    def compile(self, model: nn.Module) -> None:
        """The ``compile`` section: each decoder layer in place, before it is sharded."""
        section = self.config.compile
        compile_layers(
            decoder_layers(model),
            backend=section.backend,
            mode=section.mode,
            fullgraph=section.fullgraph,
            dynamic=section.dynamic,
            device=self.layout.device,
        )

    def choose_loss_head(self, model: nn.Module) -> LossOf | None:
        """The model's output layer made one that computes the loss; None where that has to see full logits."""
        if self.config.loss_fn is not None or not self.layout.is_last_stage:
            return None
        head = install_loss_head(
            self.asked(model), self.forward_options, self.row_multiple, self.layout.device
        )
        if head is None:
            return None
        self.all_up_to = head.all_up_to
        return head.loss_of  # no state: the layer's parameters are the model's

    def asked(self, model: nn.Module) -> nn.Module:
        """What can be asked about *model* by a few tokens: itself, or what has hidden states for a later stage."""
        if self.staged is None or self.layout.pp_rank == 0:
            return model
        return FromTokens(model, self.staged.width)

    def log_model(self, model: nn.Module) -> None:
        """One line: the model's class and size, the ranks and how they share it, the steps to come."""
        num_all = sum(p.numel() for p in model.parameters())
        num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        trained = "" if num_trained == num_all else f", {num_trained:,} of them trained"
        sizes, steps = self.layout.sizes, self.step_scheduler.planned_steps
        log.info(
            "%s with %s parameters%s; %d rank%s, %s%s; %s steps",
            type(model).__name__,
            f"{num_all:,}",
            trained,
            sizes.world,
            "" if sizes.world == 1 else "s",
            choose_strategy(self.config.distributed.strategy, sizes),
            f" ({sizes})" if max(sizes.dp_replicate, sizes.tp, sizes.pp, sizes.cp) > 1 else "",
            "unknown" if steps is None else steps,
        )
