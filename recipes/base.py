"""What every fine-tuning recipe does alike: :meth:`FinetuneRecipe.setup` builds and resumes, then a loop of steps.

What surrounds the steps, from joining the ranks to the last line of the log, is in :mod:`.lifecycle`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig

from automodel_ckpt.checkpoint import Checkpointer
from automodel_ckpt.checkpoint.hf_assets import HFAssets
from automodel_ckpt.checkpoint.saving.side_files import Assets
from automodel_ckpt.checkpoint.trees import keep_whole, unwrap
from automodel_ckpt.config.schema import ModelConfig, RecipeConfig, Target
from automodel_ckpt.config.targets import build
from automodel_ckpt.data.loader import GlobalBatch, GlobalBatchLoader
from automodel_ckpt.data.packing import longest_sample
from automodel_ckpt.distributed.context_parallel import ContextParallel, check_context_heads, check_context_parallel
from automodel_ckpt.distributed.parallelize import (
    Materialise,
    Parallelism,
    check_parallelism,
    clip_gradients,
    compute_context,
    decoder_layers,
    gradient_sync,
    parallelize,
    reshard,
)
from automodel_ckpt.distributed.sizes import choose_strategy
from automodel_ckpt.distributed.stop import StoppedWaiting
from automodel_ckpt.distributed.tensor_parallel import check_heads
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.adapter import why_whole
from automodel_ckpt.models.build import (
    base_directory,
    check_complete,
    check_context,
    check_trained_types,
    check_vocabulary,
    checkpoint_activations,
    freeze,
    load_model_config,
    refuse_attention,
    refuse_other_task,
    require_local,
)
from automodel_ckpt.models.compiling import compile_layers
from automodel_ckpt.models.loss_head import LossOf, install_loss_head
from automodel_ckpt.models.probe import forward_parameters, logits_of
from automodel_ckpt.models.stages import check_stages
from automodel_ckpt.models.vocabulary import (
    num_embeddings,
    refuse_unknown_ids,
    resize_vocabulary,
    set_size,
    vocabulary_names,
    wanted_size,
)
from automodel_ckpt.recipes.adapters import adapt, adapter_assets, fresh_base, lora_of, quantization, with_copies
from automodel_ckpt.recipes.alike import refuse_unlike_lengths
from automodel_ckpt.recipes.blueprint import Blueprint, draw_up, hold_names
from automodel_ckpt.recipes.context import cut_rows
from automodel_ckpt.recipes.lifecycle import Control, Lifecycle, StepResult, Validation
from automodel_ckpt.recipes.stages import (
    FromTokens,
    Staged,
    cut,
    refuse_idle_stages,
    refuse_own_steps,
    tell_idle_share,
    train_together,
)
from automodel_ckpt.training.loss import (
    WHOLE,
    LossFn,
    cross_entropy_sum,
    labelled_positions,
    next_token_loss,
    num_label_tokens,
    refuse_unfit,
)
from automodel_ckpt.training.lr import build_schedule, current_rate
from automodel_ckpt.training.optim import adamw, refuse_unsharded, refuse_unsteppable, trainable
from automodel_ckpt.training.rng import StatefulRNG
from automodel_ckpt.training.step_scheduler import Cadence, Due, StepScheduler, total_steps

__all__ = ["Control", "FinetuneRecipe", "Rows", "StepResult", "Validation"]

log = logging.getLogger("automodel_ckpt")

Rows = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
"""From a collated micro-batch to the rows that the model sees, with the same sum of losses over labels."""


class FinetuneRecipe(Lifecycle):
    """The base of the recipes: a subclass's :meth:`build` says what is trained on what, from the parts that are here.

    Every attribute with ``state_dict`` and ``load_state_dict`` is saved and restored, whatever its name, unless it is
    in the set ``untracked``. To add your own, extend :meth:`build`.
    """

    Config = RecipeConfig

    auto_class: ClassVar[Any]
    """The class of transformers whose ``from_pretrained`` and ``from_config`` make the model."""
    task_type: ClassVar[str | None] = None
    """peft's name of the task; None where peft has no class of models for it."""
    longest_checked = 0
    """Tokens of the longest sample that is known to fit into the model's context."""
    loss_fn: LossFn
    all_up_to = 0
    """Places of a micro-batch up to which the loss head takes those without a label too."""
    context: ContextParallel | None = None
    """The cut through rows that context parallel ranks share."""
    staged: Staged | None = None
    """This rank's stage of a pipeline; None: it has the whole model."""
    validation_batches: Callable[[], Iterator[GlobalBatch]] | None
    """Reads the validation set from its start; None: there is none."""
    model_config: PreTrainedConfig | None
    """The transformers configuration; None for a model by ``_target_``."""
    only_planned: bool = False
    """Whether the model is only counted, for ``--dry-run`` (recipes.planning): it stays without values."""
    preprocessor: Any
    """The tokenizer or processor, whose files an export carries along; None: there is none."""

    # ---------------------------------------------------------------- setup

    def setup(self) -> None:
        """Build everything and resume. What is wrong with the recipe shows before the model's weights are read."""
        self.layout = self.join_ranks()
        check_parallelism(self.parallelism, self.layout)
        if self.in_stages:
            refuse_own_steps(self, FinetuneRecipe)
        self.checkpointer = self.build_checkpointer()
        self.build()
        # What is drawn before this line is drawn alike on all ranks; nothing is drawn between it and the first step.
        # Ranks that compute one thing together (tensor parallel) draw alike: what they hold in common stays common.
        self.rng = StatefulRNG(self.config.seed, self.layout.random_stream, self.layout.sizes.grid)
        if self.checkpointer is not None:
            self.checkpointer.assets.update(self.build_assets())
        self.resume()

    def build(self) -> None:
        """Make the attributes that training needs, alike on all ranks. Each recipe defines it."""
        raise NotImplementedError

    def build_training(self) -> None:
        """The attributes that training needs, from the recipe's sections; :attr:`preprocessor` is there already."""
        self.model_config = self.check_model_config()
        self.dataloader = self.build_dataloader(self.config.dataset)
        self.validation_batches = self.build_validation()
        self.step_scheduler = self.build_step_scheduler()
        self.model = self.build_model()
        self.optimizer = self.build_optimizer()
        self.lr_scheduler = self.build_lr_scheduler()
        self.loss_fn = self.build_loss_fn()

    # ---------------------------------------------------------------- parts

    @property
    def cadence(self) -> Cadence:
        """The recipe's ``step_scheduler`` section."""
        steps = self.config.step_scheduler
        return Cadence(
            max_steps=steps.max_steps,
            num_epochs=steps.num_epochs,
            ckpt_every_steps=None if steps.ckpt_every_steps == "auto" else steps.ckpt_every_steps,
            mtbf_seconds=3600 * steps.mtbf_hours if steps.ckpt_every_steps == "auto" else None,
            ckpt_every_epochs=steps.ckpt_every_epochs,
            ckpt_every_minutes=steps.ckpt_every_minutes,
            ckpt_on_best=steps.ckpt_on_best,
            val_every_steps=steps.val_every_steps,
            max_time_seconds=steps.max_time_seconds,
            has_validation=self.config.validation_dataset is not None,
        )

    def named_or_the_models(self, key: str) -> tuple[str | None, str]:
        """The directory or Hub name in the section *key* (tokenizer, processor), else the pretrained model's; and where
        it stands. :class:`RecipeError` for a path where nothing is."""
        name, where = getattr(self.config, key).from_pretrained, f"{key}.from_pretrained"
        if name is None and isinstance(self.config.model, ModelConfig):
            name, where = self.config.model.from_pretrained, "model.from_pretrained"
        if name is not None:
            require_local(name, where)
        return name, where

    def check_model_config(self) -> PreTrainedConfig | None:
        """The transformers configuration, checked against the tokenizer, the data and the grid of ranks; None for a
        model by ``_target_``."""
        model, tokenizer, sizes = self.config.model, self.text_tokenizer, self.layout.sizes
        if isinstance(model, Target):
            return None
        found = load_model_config(
            from_pretrained=model.from_pretrained, from_config=model.from_config,
            tokenizer=tokenizer, processor=self.preprocessor,
        )  # fmt: skip
        refuse_other_task(found, self.auto_class)
        size = wanted_size(model.vocab_size, tokenizer)
        if size is not None and model.from_config is not None:
            set_size(found, size)
        check_vocabulary(found, tokenizer, size=size)
        check_heads(found, sizes.tp)
        check_context_heads(found, sizes.cp, sizes.tp)
        for name in ("dataset", "validation_dataset"):
            section = getattr(self.config, name)
            seq_length = section.kwargs.get("seq_length") if section is not None else None
            if seq_length is not None:
                check_context(found, int(seq_length), f"{name}.seq_length")
        return found

    def build_dataloader(self, section: Target, *, validation: bool = False) -> GlobalBatchLoader:
        """A loader of this rank's part of the global batches; for validation in order, and without accumulation."""
        config, steps, dp_size = self.config.dataloader, self.config.step_scheduler, self.layout.dp_size
        validated = steps.local_batch_size * dp_size * self.layout.sizes.pp
        loader = GlobalBatchLoader(
            self.build_dataset(section),
            # A pipeline is filled by as many micro-batches as it has stages.
            global_batch_size=validated if validation else steps.global_batch_size,
            local_batch_size=steps.local_batch_size,
            collate_fn=self.build_collate_fn(),
            dp_rank=self.layout.dp_rank,
            dp_size=dp_size,
            seed=self.config.seed,
            shuffle=config.shuffle and not validation,
            drop_last=config.drop_last and not validation,
            num_workers=0 if validation else config.num_workers,
        )
        name = "validation_dataset" if validation else "dataset"
        refuse_unlike_lengths(name, loader.num_samples, self.layout.gloo_group)
        return loader

    def build_dataset(self, section: Target) -> Any:
        """The data set that a section names. Each recipe defines it."""
        raise NotImplementedError

    def build_collate_fn(self) -> Any:
        """The function from samples to a micro-batch. Each recipe defines it."""
        raise NotImplementedError

    def build_validation(self) -> Callable[[], Iterator[GlobalBatch]] | None:
        """A function that reads the validation set from its start; the loader is no state of the run."""
        if self.config.validation_dataset is None:
            return None
        return partial(iter, self.build_dataloader(self.config.validation_dataset, validation=True))

    def build_step_scheduler(self) -> StepScheduler:
        """The counters, and how many steps there will be as far as can be known."""
        try:
            steps_per_epoch = len(self.dataloader)
        except TypeError:
            steps_per_epoch = None
        planned = total_steps(self.cadence, steps_per_epoch)
        self.progress.total_steps = planned
        return StepScheduler(self.cadence, planned_steps=planned)

    def build_model(self) -> nn.Module:
        """The model, frozen where asked, with this rank's share of the parameters."""
        blueprint = self.draw_up()
        model = blueprint.model
        section = self.config.model
        if isinstance(section, ModelConfig):
            num_base_rows = self.num_base_rows(model)
            self.resize(model, section)
            self.name_tensors(model, section)
            if self.config.peft is not None:
                self.adapted = adapt(model, self.config.peft, num_base_rows, self.task_type)
                model, blueprint = self.adapted.model, with_copies(blueprint, self.adapted.model)
            else:
                freeze(model, section.freeze)
                keep_whole(model)
            if section.activation_checkpointing:
                checkpoint_activations(model)
        else:
            freeze(model, [])
        check_trained_types(model)
        # A cache of keys and values serves generation only; building it in each step costs.
        takes_use_cache = "use_cache" in forward_parameters(model)
        self.forward_options = {"use_cache": False} if takes_use_cache else {}
        if self.in_stages:
            check_stages(model, self.layout.sizes.pp)
        self.log_model(model)
        if self.layout.sizes.cp > 1:
            check_context_parallel(model)
        if self.only_planned:
            return model
        refuse_attention(model, self.layout.device)
        shared = self.parallelize(model, blueprint.materialise)
        # These run the model on a few tokens, which all its ranks do together.
        self.row_layout = self.choose_row_layout(model)
        self.loss_of = self.choose_loss_head(model)
        if self.layout.sizes.cp > 1:
            self.context = cut_rows(model, self.layout, self.forward_options)
        reshard(shared)
        return shared

    @property
    def in_stages(self) -> bool:
        """Whether ranks hold different layers of the model."""
        return self.layout.sizes.pp > 1

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.layout.pp_rank == self.layout.sizes.pp - 1

    def draw_up(self) -> Blueprint:
        """The model as it is before it is changed or shared out."""
        section = self.config.model
        if isinstance(section, Target):
            made = build(section)
            check_complete(made)
            return Blueprint(made)
        assert self.model_config is not None
        size, peft = wanted_size(section.vocab_size, self.text_tokenizer), self.config.peft
        return draw_up(
            replace(section, from_pretrained=self.prepare_base()),
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
        return getattr(self.model_config.get_text_config(), "vocab_size", None) or num_embeddings(model)

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
            self.config, self.model_config,
            auto_class=self.auto_class, preprocessor=self.preprocessor, layout=self.layout,
        )  # fmt: skip
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
            compute_dtype=getattr(torch, config.mixed_precision) if config.mixed_precision else None,
            cpu_offload=config.cpu_offload,
            sequence_parallel=config.sequence_parallel,
        )

    @property
    def row_multiple(self) -> int:
        """Rows are padded to a multiple of this many tokens, so that they can be cut along the sequence."""
        return math.lcm(self.config.dataloader.pad_to_multiple_of or 1, self.row_parts)

    @property
    def row_parts(self) -> int:
        """Ranks that have a slice of each row: of a context parallel group, or a tensor parallel one."""
        sizes = self.layout.sizes
        return sizes.cp if sizes.cp > 1 else sizes.tp if self.config.distributed.sequence_parallel else 1

    def parallelize(self, model: nn.Module, materialise: Materialise | None = None) -> nn.Module:
        """This rank's share of the model with its values, and the type that all ranks compute in."""
        plan = self.config.distributed.tp_plan
        how = replace(self.parallelism, tp_plan=build(plan, model=model) if plan is not None else None)
        strategy = choose_strategy(how.strategy, self.layout.sizes)
        if how.compute_dtype is not None:
            means = "the parameters gathered in it" if strategy == "fsdp2" else "autocast"
            kept, computed = (
                str(t).removeprefix("torch.") for t in (next(model.parameters()).dtype, how.compute_dtype)
            )
            log.info("computing in %s (%s); weights and optimizer in %s", computed, means, kept)
        self.computing = compute_context(strategy, self.layout.device, how.compute_dtype)
        gathered_in = how.compute_dtype if strategy == "fsdp2" else None
        made = cut(model, self.layout, how.tp_plan, gathered_in) if self.in_stages else None
        if self.config.compile.enabled:
            self.compile(model)
        if made is None:
            return parallelize(model, self.layout, how, materialise)
        shared = parallelize(model, self.layout, replace(how, tp_plan=made.tp_plan), materialise, made.mesh)
        self.staged = Staged(shared, self.layout, made, self.config.distributed.pp_schedule)
        steps = self.config.step_scheduler
        tell_idle_share(steps.global_batch_size // (steps.local_batch_size * self.layout.dp_size), self.layout)
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
        if self.config.loss_fn is not None or not self.is_last_stage:
            return None
        head = install_loss_head(self.asked(model), self.forward_options, self.row_multiple, self.layout.device)
        if head is None:
            log.info("the loss is computed from full logits: %s has no output layer that alone gives them",
                     type(model).__name__)  # fmt: skip
            return None
        self.all_up_to = head.all_up_to
        return head.loss_of  # no state: the layer's parameters are the model's

    def asked(self, model: nn.Module) -> nn.Module:
        """What can be asked about *model* by a few tokens: itself, or what has hidden states for a later stage."""
        if self.staged is None or self.layout.pp_rank == 0:
            return model
        return FromTokens(model, self.staged.width)

    def log_model(self, model: nn.Module) -> None:
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

    def build_optimizer(self) -> torch.optim.Optimizer:
        """The ``optimizer`` section over all parameters that need gradients."""
        section, params = self.config.optimizer, trainable([self.model])
        if self.in_stages:
            refuse_idle_stages(params, self.layout)
        optimizer: torch.optim.Optimizer
        if isinstance(section, Target):
            optimizer = build(section, params=params)
            refuse_unsteppable(optimizer, self.takes_own_steps)
        else:
            optimizer = adamw(
                params, lr=section.lr, betas=section.betas, eps=section.eps, weight_decay=section.weight_decay
            )
        if self.staged is not None:
            train_together(optimizer, self.model, self.layout)
        return optimizer

    @property
    def takes_own_steps(self) -> bool:
        """Whether a subclass calls the optimizer in its own way."""
        return type(self).train_step is not FinetuneRecipe.train_step

    def build_lr_scheduler(self) -> torch.optim.lr_scheduler.LRScheduler | None:
        """The ``lr_scheduler`` section over the planned steps; None for a constant rate."""
        section = self.config.lr_scheduler
        if section is None:
            return None
        return build_schedule(
            self.optimizer,
            section.name,
            total_steps=self.step_scheduler.planned_steps,
            warmup_steps=section.warmup_steps,
            warmup_ratio=section.warmup_ratio,
            decay_steps=section.decay_steps,
            kwargs=section.kwargs,
        )

    def build_loss_fn(self) -> LossFn:
        """The ``loss_fn`` section (its contract: :data:`~automodel_ckpt.training.loss.LossFn`), else cross-entropy."""
        section = self.config.loss_fn
        if section is None:
            return cross_entropy_sum
        loss_fn = build(section, reduction="sum")
        if getattr(loss_fn, "reduction", "sum") != "sum":
            raise RecipeError(
                "a loss has to be the sum over the labels: the recipe divides by those of the whole global batch",
                where="loss_fn.reduction",
                value=loss_fn.reduction,
                remedy="leave reduction out",
            )
        refuse_unfit(loss_fn)
        if isinstance(loss_fn, nn.Module):
            loss_fn = loss_fn.to(self.layout.device)
            # A module without parameters has nothing to be saved; its bound method is no state.
            return loss_fn if loss_fn.state_dict() else loss_fn.forward
        return loss_fn  # type: ignore[no-any-return]

    @property
    def model_layout(self) -> Literal["shards", "hf", "adapter"]:
        """``checkpoint.model_layout``, by default what goes with the format and with adapters."""
        section = self.config.checkpoint
        adapter = self.config.peft is not None and section.model_save_format == "safetensors"
        return section.model_layout or ("adapter" if adapter else "shards")

    def build_checkpointer(self) -> Checkpointer | None:
        """The ``checkpoint`` section, its directory held; None when it is not enabled."""
        section = self.config.checkpoint
        if not section.enabled:
            return None
        checkpointer = Checkpointer(
            section.checkpoint_dir,
            ranks=self.layout,
            group=self.layout.gloo_group,
            model_save_format=section.model_save_format,
            model_layout=self.model_layout,
            save_consolidated=section.save_consolidated,
            restore_from=section.restore_from,
            save_optimizer=section.save_optimizer,
            best_metric_key=section.best_metric_key,
            best_mode=section.best_mode,
            keep_last=section.keep_last,
            keep_best=section.keep_best,
            keep_every_steps=section.keep_every_steps,
            keep_steps=section.keep_steps,
            verify=section.verify,
            allow_missing_state=section.allow_missing_state,
            on_incompatible=section.on_incompatible,
            is_async=section.is_async,
            patience_seconds=60 * self.config.distributed.timeout_minutes,
        )
        checkpointer.open()
        return checkpointer

    def build_assets(self) -> dict[str, Assets]:
        """What an export of ``model`` needs beside its weights; nothing for a model that is not transformers'."""
        section, peft = self.config.model, self.config.peft
        if self.model_config is None or isinstance(section, Target):
            return {}
        if peft is not None:
            base, run = section.from_pretrained or peft.base_dir or "", Path(self.config.checkpoint.checkpoint_dir)
            return {
                "model": adapter_assets(
                    self.model, self.adapted, base,
                    run=run, preprocessor=self.preprocessor,
                    reads_base=self.layout.is_leader and not self.only_planned,
                )
            }  # fmt: skip
        base_dir = base_directory(section.from_pretrained) if section.from_pretrained else None
        declared = (*section.allow_missing, *section.allow_unexpected, *self.vocabulary)
        assets = HFAssets.from_model(self.model, tokenizer=self.preprocessor, base_dir=base_dir, declared=declared)
        assets.validate()
        return {"model": assets}

    # ---------------------------------------------------------------- loop

    def run(self) -> None:
        """Train from where the run stands to its end. Raises :class:`Stopped` when a signal came in."""
        self.make_up_validation()
        if self.step_scheduler.is_finished():
            self.already_complete()
            return
        while not self.step_scheduler.is_finished():
            self.run_epoch()
        self.end()

    def run_epoch(self) -> None:
        """Train on the rest of the current epoch, or until the run is over."""
        for batch in self.batches(self.dataloader):
            if batch is not None and self.step_scheduler.is_beyond_last_epoch(batch.epoch):
                self.step_scheduler.end_early()
                return
            control = self.agree_on(batch)
            if control.save_failed:
                self.settle()
            if control.stop or batch is None:
                self.stop()
            try:
                due = self.step(batch, control)
            except (IndexError, RuntimeError) as error:
                self.explain(error, batch)
                raise
            if due.stop:
                self.stop()
            if due.validate or due.save:
                self.validate_and_save(validate=due.validate, save=due.save, last=due.last)
            if due.last:
                return

    def explain(self, error: Exception, batch: GlobalBatch) -> None:
        """Raises :class:`RecipeError` where a step failed because *batch* has tokens that the model does not have, or
        because the optimizer cannot take sharded parameters.

        torch says only that an index is out of range, on a GPU not even that. Looked for afterwards, so at no cost.
        """
        refuse_unsharded(self.optimizer, error)
        where = f"the global batch of samples {batch.sample_ids[:16]}"
        refuse_unknown_ids(batch.micro_batches, num_embeddings(unwrap(self.model)), where)

    def batches(self, source: Iterable[GlobalBatch]) -> Iterator[GlobalBatch | None]:
        """The batches of *source*; a last None when this rank is asked to stop while it waits for one."""
        with closing(iter(source)) as batches:  # type: ignore[type-var]
            while True:
                try:
                    with self.stop_request.interrupting():
                        batch = next(batches, None)
                except StoppedWaiting:
                    yield None
                    return
                if batch is None:
                    return
                yield batch

    def agree_on(self, batch: GlobalBatch | None) -> Control:
        """The control vector: one small reduction tells every rank the batch's tokens and whether any has to stop.

        None stands for the batch that this rank was waiting for when it was asked to stop.
        """
        micro_batches = batch.micro_batches if batch is not None else []
        labels = [num_label_tokens(micro["labels"]) for micro in micro_batches]
        # A micro-batch without labels weighs nothing; among them are those that only keep a rank in step.
        tokens = [_num_tokens(micro) if count else 0 for micro, count in zip(micro_batches, labels, strict=True)]
        counts = (sum(labels), sum(tokens)) if self.layout.reports else (0, 0)
        failed = self.checkpointer is not None and self.checkpointer.upload_failed
        vector = self.sum_over_ranks(*counts, batch is None or self.stop_request.wanted, failed)
        return Control(int(vector[0]), int(vector[1]), vector[2] > 0, vector[3] > 0)

    def step(self, batch: GlobalBatch, control: Control) -> Due:
        """One global batch: train, count, log."""
        started = time.perf_counter()
        self.step_scheduler.start_step()
        lr = current_rate(self.optimizer)
        loss_sum, grad_norm = self.train_step(batch, control)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        total, due = self.finish_step(batch, control, loss_sum)
        loss = total / control.num_label_tokens if control.num_label_tokens else math.nan
        self.log_step(batch, control, StepResult(loss, grad_norm, lr), time.perf_counter() - started)
        return due

    def train_step(self, batch: GlobalBatch, control: Control) -> tuple[float, float]:
        """Forward, backward, clip, update. Returns this rank's summed loss and the global gradient norm.

        The gradient is that of the mean over the global batch's label tokens. A batch without labels, or with a
        gradient that is not finite, changes no weight: without gradients the optimizer's step does nothing.
        """
        if control.num_label_tokens == 0:
            log.warning("step %d: no label in the whole global batch, no update", self.step_scheduler.step + 1)
            self.optimizer.step()
            return 0.0, 0.0
        # The wrappers average over the ranks what has to be a sum.
        scale = self.layout.sizes.token_parts / control.num_label_tokens
        loss_sum = self.accumulate(batch, scale)
        grad_norm = self.clip_gradients()
        if not math.isfinite(grad_norm):
            log.warning("step %d: the gradient norm is %s, no update", self.step_scheduler.step + 1, grad_norm)
            self.optimizer.zero_grad(set_to_none=True)
        if self.checkpointer is not None:
            self.checkpointer.await_copies()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss_sum.item(), grad_norm

    def accumulate(self, batch: GlobalBatch, weight: float) -> torch.Tensor:
        """The gradient of the summed loss times *weight*; returns this rank's summed loss, 0-dim."""
        if self.staged is not None:
            rows = [self.rows_of(micro_batch) for micro_batch in batch.micro_batches]
            return _sum_of(self.staged.train(rows, self.outcome, weight))
        losses = []
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            with gradient_sync(self.model, enabled=number == len(batch.micro_batches)):
                loss = self.micro_batch_loss(micro_batch)
                torch.autograd.backward(loss, torch.full_like(loss, weight))
            losses.append(loss.detach())
        return _sum_of(losses)

    def micro_batch_loss(self, micro_batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of one micro-batch, summed over its labels; 0-dim, on the device."""
        return self.outcome(self.rows_of(micro_batch))

    def rows_of(self, micro_batch: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """What the model sees of a micro-batch."""
        self.check_length(longest_sample(micro_batch))
        return self.row_layout(micro_batch) if self.row_layout is not None else micro_batch

    def outcome(self, rows: Mapping[str, torch.Tensor], hidden: torch.Tensor | None = None) -> torch.Tensor:
        """The loss of *rows*, summed over their labels; 0-dim, on the device.

        On a later stage of a pipeline it goes on from the *hidden* states [B, T, H] of the stage before, and on all
        but the last it ends with those for the next.
        """
        part = self.part_of_row(rows["labels"].shape[1])
        inputs = {name: self.on_device(value) for name, value in rows.items() if name != "labels"}
        if hidden is not None:
            inputs = {name: value for name, value in inputs.items() if name != "input_ids"} | {"inputs_embeds": hidden}
        if not self.is_last_stage:
            with self.computing():
                return logits_of(self.model(**inputs, **self.forward_options))
        if self.loss_of is None:
            with self.computing():
                output = self.model(**inputs, **self.forward_options)
            return next_token_loss(logits_of(output), self.on_device(rows["labels"]), self.loss_fn, part)
        positions, targets = labelled_positions(rows["labels"], part, all_up_to=self.all_up_to)
        places = self.on_device(positions) if positions is not None else None
        with self.computing(), self.loss_of(places, self.on_device(targets)):
            output = self.model(**inputs, **self.forward_options)
        return logits_of(output)

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """*tensor* where the model is."""
        return tensor.to(self.layout.device, non_blocking=True)

    def check_length(self, num_tokens: int) -> None:
        """:class:`RecipeError` for a sample, padding included, that is longer than the model's context."""
        if self.model_config is not None and num_tokens > self.longest_checked:
            check_context(self.model_config, num_tokens, f"a sample of step {self.step_scheduler.step + 1}")
            self.longest_checked = num_tokens

    def part_of_row(self, length: int) -> slice:
        """The places of a row of *length* tokens that this rank's outputs are of.

        Raises :class:`RecipeError` for rows that cannot be cut evenly.
        """
        if length % self.row_parts:
            key = "cp_size" if self.context is not None else "sequence_parallel"
            raise RecipeError(
                "a row cannot be cut along the sequence",
                where=f"distributed.{key}",
                value=f"{length} tokens among {self.row_parts} ranks",
                remedy=f"let your collate_fn pad to a multiple of {self.row_parts}, or leave {key} out",
            )
        return WHOLE if self.context is None else self.context.slice_of(length)

    def clip_gradients(self) -> float:
        """Have all gradients scaled together to ``clip_grad_norm``, now or by the optimizer as it reads them; returns
        their norm before that."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        counted_elsewhere = self.staged.counted_elsewhere if self.staged is not None else frozenset[int]()
        return clip_gradients(
            parameters,
            self.config.clip_grad_norm,
            in_step=getattr(self.optimizer, "divide_in_step", None),
            in_stages=self.in_stages,
            counted_elsewhere=counted_elsewhere,
        )

    def finish_step(self, batch: GlobalBatch, control: Control, loss_sum: float) -> tuple[float, Due]:
        """Count a step; returns the loss summed over the global batch, and what is due.

        The clock is the leader's, so that all ranks save and end at the same step with the same state. A signal is
        looked for here too: the next look is after what is due, which may be an export.
        """
        scheduler, leads = self.step_scheduler, self.layout.is_leader
        total, elapsed, save, end, stop = self.sum_over_ranks(
            loss_sum if self.layout.reports_loss else 0.0,
            scheduler.measured_seconds() if leads else 0.0,
            leads and scheduler.save_is_wanted(),
            leads and scheduler.time_is_up(),
            self.stop_request.wanted,
        )
        self.dataloader.mark_consumed(batch)
        return total, scheduler.finish_step(
            epoch=batch.epoch,
            epochs_done=self.dataloader.epoch,
            num_samples=len(batch.sample_ids),
            num_tokens=control.num_tokens,
            elapsed_seconds=elapsed,
            save_is_wanted=save > 0,
            time_is_up=end > 0,
            stop=stop > 0,
        )

    # ---------------------------------------------------------------- validate

    def validate(self) -> Validation | None:
        """The mean loss over the validation set, without a trace in the training: no gradient, no random number.

        None when a stop was asked for: it is looked for at every batch.
        """
        assert self.validation_batches is not None
        self.model.eval()
        try:
            with torch.no_grad(), self.rng.preserved():
                totals = self.validation_totals(self.validation_batches())
        finally:
            self.model.train()
            reshard(self.model)
        if totals is None:
            return None
        loss, num_label_tokens = totals
        return Validation(loss / num_label_tokens if num_label_tokens else math.nan, int(num_label_tokens))

    def validation_totals(self, batches: Iterable[GlobalBatch]) -> tuple[float, float] | None:
        """The summed loss and the label tokens of all batches and ranks; None when a stop was asked for.

        What a batch gave is summed over the ranks before the next forward pass, with the wish to stop: a rank that was
        still waiting for its data must be heard before the others enter a collective without it.
        """
        loss, num_label_tokens, mine = 0.0, 0.0, (0.0, 0)
        for batch in chain(self.batches(batches), [_END]):
            sums = self.sum_over_ranks(*mine, batch is None or self.stop_request.wanted)
            if sums[2] > 0:
                return None
            loss, num_label_tokens = loss + sums[0], num_label_tokens + sums[1]
            mine = self.validation_sums(batch or _END)
        return loss, num_label_tokens

    def validation_sums(self, batch: GlobalBatch) -> tuple[float, int]:
        """This rank's summed loss and label tokens of one batch; zeros where another rank speaks for them."""
        try:
            loss = sum(loss.double().item() for loss in self.losses_of(batch))
        except (IndexError, RuntimeError) as error:
            self.explain(error, batch)
            raise
        num_labels = sum(num_label_tokens(micro_batch["labels"]) for micro_batch in batch.micro_batches)
        return loss if self.layout.reports_loss else 0.0, num_labels if self.layout.reports else 0

    def losses_of(self, batch: GlobalBatch) -> Iterable[torch.Tensor]:
        """The summed loss of each micro-batch, without gradients; on the last stage of a pipeline only."""
        if self.staged is None:
            return map(self.micro_batch_loss, batch.micro_batches)
        return self.staged.evaluate([self.rows_of(micro_batch) for micro_batch in batch.micro_batches], self.outcome)


_END = GlobalBatch(0, 0, 0, [], [], last_of_epoch=True)


def _sum_of(losses: list[torch.Tensor]) -> torch.Tensor:
    """In float64, unless there is nothing to add; 0-dim."""
    zero = torch.zeros((), dtype=torch.float64)
    return losses[0] if len(losses) == 1 else sum((loss.double() for loss in losses), zero)


def _num_tokens(micro_batch: Mapping[str, torch.Tensor]) -> int:
    mask = micro_batch.get("attention_mask")
    return micro_batch["labels"].numel() if mask is None else int(np.count_nonzero(mask.numpy(force=True)))
