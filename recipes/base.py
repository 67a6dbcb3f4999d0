"""What every fine-tuning recipe does alike: :meth:`FinetuneRecipe.setup` builds and resumes, then a loop of steps.

The class is made in four files, each the base of the next: :mod:`.lifecycle` has what surrounds the steps, from joining
the ranks to the last line of the log; :mod:`.steps` the loop, the step and validation; :mod:`.model` the making of the
model; this one all other parts, and the order in which they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig

from automodel_ckpt.checkpoint import Checkpointer
from automodel_ckpt.checkpoint.hf_assets import HFAssets
from automodel_ckpt.checkpoint.saving.side_files import Assets
from automodel_ckpt.config.schema import ModelConfig, RecipeConfig, Target
from automodel_ckpt.config.targets import build
from automodel_ckpt.data.loader import GlobalBatch, GlobalBatchLoader
from automodel_ckpt.distributed.context_parallel import check_context_heads
from automodel_ckpt.distributed.parallelize import check_parallelism
from automodel_ckpt.distributed.tensor_parallel import check_heads
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.build import (
    base_directory,
    check_context,
    check_task,
    check_vocabulary,
    load_model_config,
    require_local,
)
from automodel_ckpt.models.vocabulary import set_size, wanted_size
from automodel_ckpt.recipes.adapters import adapter_assets
from automodel_ckpt.recipes.init_from import verify_side_files
from automodel_ckpt.recipes.model import ModelBuilding
from automodel_ckpt.recipes.optimizers import AddUp, build_optimizer, log_groups
from automodel_ckpt.recipes.pipeline import (
    add_up_stages,
    check_no_idle_stages,
    check_single_step_optimizer,
    train_stages,
)
from automodel_ckpt.recipes.rank_consistency import validate_equal_lengths
from automodel_ckpt.recipes.records import Control, StepResult, Validation
from automodel_ckpt.recipes.trainable import Rows
from automodel_ckpt.training.loss import LossFn, check_labels, cross_entropy_sum
from automodel_ckpt.training.lr import build_schedule
from automodel_ckpt.training.optim import trainable
from automodel_ckpt.training.rng import StatefulRNG
from automodel_ckpt.training.step_scheduler import Cadence, StepScheduler, total_steps

__all__ = ["Control", "FinetuneRecipe", "Rows", "StepResult", "Validation"]


class FinetuneRecipe(ModelBuilding):
    """The base of the recipes: a subclass's :meth:`build` says what is trained on what, from the parts that are here.

    Every attribute with ``state_dict`` and ``load_state_dict`` is saved and restored, whatever its name, unless it is
    in the set ``untracked``. To add your own, extend :meth:`build`.
    """

    Config = RecipeConfig

    # ---------------------------------------------------------------- setup

    def setup(self) -> None:
        """Build everything and resume. What is wrong with the recipe shows before the model's weights are read."""
        self.check_moved_methods()
        self.layout = self.join_ranks()
        check_parallelism(self.parallelism, self.layout)
        if self.layout.in_stages:
            check_single_step_optimizer(self, FinetuneRecipe)
        self.checkpointer = self.build_checkpointer()
        if self.checkpointer is not None:
            self.hold_checkpointer(self.checkpointer)
        self.build()
        self.run_log.progress.total_steps = self.step_scheduler.planned_steps
        # What is drawn before this line is drawn alike on all ranks; nothing is drawn between it and the first step.
        # Ranks that compute one thing together (tensor parallel) draw alike: what they hold in common stays common.
        self.rng = StatefulRNG(self.config.seed, self.layout.random_stream, self.layout.sizes.grid)
        if self.checkpointer is not None:
            self.checkpointer.assets.update(self.build_assets())
            self.check_export(self.checkpointer.assets)
        self.objective = self.build_objective()
        self.saves = self.build_saves()
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
            num_epochs=steps.effective_num_epochs,
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
        it is given. Raises :class:`RecipeError` for a path that does not exist, and :class:`CheckpointUnusable` for
        an export whose files are damaged."""
        name, where = getattr(self.config, key).from_pretrained, f"{key}.from_pretrained"
        if name is None and isinstance(self.config.model, ModelConfig):
            name, where = self.config.model.from_pretrained, "model.from_pretrained"
        if name is not None:
            require_local(name, where)
            verify_side_files(name, self.config.checkpoint.verify)
        return name, where

    def check_model_config(self) -> PreTrainedConfig | None:
        """The transformers configuration, checked against the tokenizer, the data and the grid of ranks; None for a
        model by ``_target_``."""
        model, tokenizer, sizes = self.config.model, self.text_tokenizer, self.layout.sizes
        if isinstance(model, Target):
            return None
        found = load_model_config(
            from_pretrained=model.from_pretrained,
            from_config=model.from_config,
            tokenizer=tokenizer,
            processor=self.preprocessor,
        )
        check_task(found, self.auto_class)
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
        config, steps, dp_size = (
            self.config.dataloader,
            self.config.step_scheduler,
            self.layout.dp_size,
        )
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
        validate_equal_lengths(name, loader.num_samples, self.layout.gloo_group)
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
        planned = total_steps(self.cadence, self._steps_per_epoch())
        return StepScheduler(self.cadence, planned_steps=planned)

    def build_optimizer(self) -> torch.optim.Optimizer:
        """The ``optimizer`` section over all parameters that need gradients."""
        add_up: AddUp = list
        if self.layout.in_stages:
            check_no_idle_stages(trainable([self.model]), self.layout)
            add_up = partial(add_up_stages, self.layout)
        optimizer, labels = build_optimizer(
            self.config.optimizer, self.model, add_up=add_up, takes_own_steps=self.takes_own_steps
        )
        if self.staged is not None:
            train_stages(optimizer, self.model, self.layout)
        log_groups(optimizer, labels)
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
                hint="leave reduction out",
            )
        check_labels(loss_fn)
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
            self.layout,
            self.layout.gloo_group,
            replace(section, model_layout=self.model_layout),
            timeout_seconds=60 * self.config.distributed.timeout_minutes,
        )
        checkpointer.open()
        return checkpointer

    def check_export(self, assets: Mapping[str, Assets]) -> None:
        """Raise :class:`RecipeError` where an export is asked for, and there are no *assets* to make one with."""
        section = self.config.checkpoint
        for key in ("save_consolidated", "export_best"):
            if getattr(section, key) and not assets:
                raise RecipeError(
                    "there is nothing to export: only models of transformers have Hugging Face files",
                    where=f"checkpoint.{key}",
                    value=str(getattr(section, key)).lower(),
                    hint="remove the key; or give your recipe a build_assets method that describes the export",
                )

    def build_assets(self) -> dict[str, Assets]:
        """What an export of ``model`` needs beside its weights; nothing for a model that is not transformers'."""
        section, peft = self.config.model, self.config.peft
        if self.model_config is None or isinstance(section, Target):
            return {}
        if peft is not None:
            base, run = (
                section.from_pretrained or peft.base_dir or "",
                Path(self.config.checkpoint.checkpoint_dir),
            )
            return {
                "model": adapter_assets(
                    self.model,
                    self.adapted,
                    base,
                    run=run,
                    preprocessor=self.preprocessor,
                    reads_base=self.layout.is_rank0 and not self.only_planned,
                )
            }
        base_dir = base_directory(section.from_pretrained) if section.from_pretrained else None
        declared = (*section.allow_missing, *section.allow_unexpected, *self.vocabulary)
        assets = HFAssets.from_model(
            self.model, tokenizer=self.preprocessor, base_dir=base_dir, declared=declared
        )
        assets.validate()
        return {"model": assets}
