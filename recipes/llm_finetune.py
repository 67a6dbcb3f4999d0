"""Supervised fine-tuning of a causal language model.

Reads from top to bottom: :meth:`LLMFinetune.setup` builds the attributes, :meth:`LLMFinetune.run` loops over global
batches, :meth:`LLMFinetune.train_step` is one optimizer step. To train something else as well, subclass it, give it
another attribute in ``setup``, and it is saved and restored with the rest.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig

from automodel_ckpt.checkpoint import Checkpointer
from automodel_ckpt.checkpoint.hf_assets import HFAssets
from automodel_ckpt.config.schema import ModelConfig, Target
from automodel_ckpt.config.targets import build
from automodel_ckpt.data.collate import PadCollator
from automodel_ckpt.data.loader import GlobalBatch, GlobalBatchLoader
from automodel_ckpt.data.packing import PackedDataset, RowLayout, longest_sample
from automodel_ckpt.distributed.parallelize import (
    choose_strategy,
    compute_context,
    full_value,
    gradient_sync,
    parallelize,
    reshard,
)
from automodel_ckpt.distributed.stop import stop_request
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.build import (
    base_directory,
    build_model,
    check_context,
    check_vocabulary,
    checkpoint_activations,
    freeze,
    load_model_config,
    require_local,
)
from automodel_ckpt.models.loss_head import LossOf, install_loss_head
from automodel_ckpt.models.probe import attention_of, keeps_samples_apart, logits_of
from automodel_ckpt.recipes.base import Control, FinetuneRecipe, StepResult, Validation
from automodel_ckpt.training.loss import (
    LossFn,
    cross_entropy_sum,
    labelled_positions,
    next_token_loss,
    num_label_tokens,
)
from automodel_ckpt.training.lr import build_schedule, current_rate
from automodel_ckpt.training.optim import adamw, trainable
from automodel_ckpt.training.rng import StatefulRNG
from automodel_ckpt.training.step_scheduler import Due, StepScheduler, total_steps

log = logging.getLogger("automodel_ckpt")


class LLMFinetune(FinetuneRecipe):
    """Trains ``model`` on ``dataset`` to predict the next token wherever there is a label."""

    # ---------------------------------------------------------------- setup

    def setup(self) -> None:
        """Build everything and resume. What is wrong with the recipe shows before the model's weights are read."""
        config = self.config
        self.layout = self.join_ranks()
        self.stop_request = stop_request()
        choose_strategy(config.distributed.strategy, self.layout.world_size)
        self.checkpointer = self.build_checkpointer()
        self.tokenizer = self.build_tokenizer()
        self.model_config = self.check_model_config()
        self.dataloader = self.build_dataloader(config.dataset)
        self.validation_batches = self.build_validation()
        self.step_scheduler = self.build_step_scheduler()
        self.model = self.build_model()
        self.optimizer = self.build_optimizer()
        self.lr_scheduler = self.build_lr_scheduler()
        self.loss_fn = self.build_loss_fn()
        self.rng = StatefulRNG(config.seed, self.layout.rank)
        if self.checkpointer is not None:
            self.checkpointer.assets.update(self.build_assets())
        self.resume()

    def build_tokenizer(self) -> Any:
        """The ``tokenizer`` section, else the pretrained model's own; None where there is neither."""
        section, model = self.config.tokenizer, self.config.model
        if isinstance(section, Target):
            return build(section)
        name, where = section.from_pretrained, "tokenizer.from_pretrained"
        if name is None and isinstance(model, ModelConfig):
            name, where = model.from_pretrained, "model.from_pretrained"
        if name is None:
            return None
        require_local(name, where)
        try:
            return AutoTokenizer.from_pretrained(os.path.expanduser(name))
        except (OSError, ValueError) as error:
            raise RecipeError(
                "the tokenizer cannot be read",
                where=where,
                value=f"{name} ({str(error).splitlines()[0]})",
                remedy="name a directory with tokenizer files in tokenizer.from_pretrained",
            ) from error

    def check_model_config(self) -> PreTrainedConfig | None:
        """The transformers configuration, checked against tokenizer and data; None for a model by ``_target_``."""
        model = self.config.model
        if isinstance(model, Target):
            return None
        found = load_model_config(
            from_pretrained=model.from_pretrained, from_config=model.from_config, tokenizer=self.tokenizer
        )
        check_vocabulary(found, self.tokenizer)
        for name in ("dataset", "validation_dataset"):
            section = getattr(self.config, name)
            seq_length = section.kwargs.get("seq_length") if section is not None else None
            if seq_length is not None:
                check_context(found, int(seq_length), f"{name}.seq_length")
        return found

    def build_dataloader(self, section: Target, *, validation: bool = False) -> GlobalBatchLoader:
        """A loader of this rank's part of the global batches; for validation in order, and without accumulation."""
        config, steps, dp_size = self.config.dataloader, self.config.step_scheduler, self.layout.dp_size
        return GlobalBatchLoader(
            self.packed(build(section, tokenizer=self.tokenizer)),
            global_batch_size=steps.local_batch_size * dp_size if validation else steps.global_batch_size,
            local_batch_size=steps.local_batch_size,
            collate_fn=self.build_collate_fn(),
            dp_rank=self.layout.dp_rank,
            dp_size=dp_size,
            seed=self.config.seed,
            shuffle=config.shuffle and not validation,
            drop_last=config.drop_last and not validation,
            num_workers=0 if validation else config.num_workers,
        )

    def packed(self, dataset: Any) -> Any:
        """The data set as it is, or with a ``packed_sequence`` section in packs."""
        section = self.config.packed_sequence
        if section is None:
            return dataset
        packs = PackedDataset(dataset, section.size)
        log.info("packed %d samples into %d packs of %d tokens, %.2f %% of them empty",
                 len(dataset), len(packs), section.size, 100 * packs.waste)  # fmt: skip
        return packs

    def build_collate_fn(self) -> Any:
        """The function from samples to a micro-batch."""
        config = self.config.dataloader
        if config.collate_fn is not None:
            return build(config.collate_fn, tokenizer=self.tokenizer)
        ids = (getattr(self.tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
        pad_token_id = next((token for token in ids if isinstance(token, int)), 0)
        return PadCollator(pad_token_id, config.pad_to_multiple_of)

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
        section = self.config.model
        if isinstance(section, Target):
            model: nn.Module = build(section)
            freeze(model, [])
        else:
            assert self.model_config is not None
            model = build_model(
                self.model_config,
                from_pretrained=section.from_pretrained,
                dtype=section.dtype,
                attn_implementation=section.attn_implementation,
            )
            freeze(model, section.freeze)
            if section.activation_checkpointing:
                checkpoint_activations(model)
        # A cache of keys and values serves generation only; building it in each step costs.
        takes_use_cache = "use_cache" in inspect.signature(model.forward).parameters
        self.forward_options = {"use_cache": False} if takes_use_cache else {}
        self.log_model(model)
        self.row_layout = self.choose_row_layout(model)
        self.loss_of = self.choose_loss_head(model)
        return self.parallelize(model)

    def parallelize(self, model: nn.Module) -> nn.Module:
        """This rank's share of the model, and the type that all ranks compute in."""
        config = self.config.distributed
        strategy = choose_strategy(config.strategy, self.layout.world_size)
        compute_dtype = getattr(torch, config.mixed_precision) if config.mixed_precision else None
        if compute_dtype is not None:
            how = "the parameters gathered in it" if strategy == "fsdp2" else "autocast"
            kept = str(next(model.parameters()).dtype).removeprefix("torch.")
            log.info("computing in %s (%s); weights and optimizer in %s", config.mixed_precision, how, kept)
        self.computing = compute_context(strategy, self.layout.device, compute_dtype)
        return parallelize(
            model,
            self.layout,
            strategy=strategy,
            reshard_after_forward=config.reshard_after_forward,
            compute_dtype=compute_dtype,
        )

    def choose_row_layout(self, model: nn.Module) -> RowLayout | None:
        """How samples share rows, if the model keeps them apart; None: each is padded to the longest."""
        config, packed = self.config.dataloader, self.config.packed_sequence is not None
        if not (config.padding_free or packed):
            return None
        attention = attention_of(model)
        one_row = "flash" in attention
        if not self.on_all_ranks(keeps_samples_apart(model.to(self.layout.device), one_row, self.forward_options)):
            if packed:
                raise RecipeError(
                    "this model does not keep the samples of a pack apart",
                    where="packed_sequence",
                    value=f"{type(model).__name__}, {attention} attention",
                    remedy="leave packed_sequence out, or use another model or attn_implementation",
                )
            log.info("samples are padded to the longest: this model does not keep those apart that share a row")
            return None
        log.info("samples share rows without padding, kept apart by their position ids (%s attention)", attention)
        hidden_size = getattr(self.model_config and self.model_config.get_text_config(), "hidden_size", 1024)
        return RowLayout(hidden_size, one_row, config.pad_to_multiple_of or 1)

    def choose_loss_head(self, model: nn.Module) -> LossOf | None:
        """The model's output layer made one that computes the loss; None where that has to see full logits."""
        if self.config.loss_fn is not None:
            return None
        head = install_loss_head(model.to(self.layout.device), self.forward_options)
        if head is None:
            log.info("the loss is computed from full logits: %s has no output layer that alone gives them",
                     type(model).__name__)  # fmt: skip
            return None
        return head.loss_of  # no state: the layer's parameters are the model's

    def log_model(self, model: nn.Module) -> None:
        num_all = sum(p.numel() for p in model.parameters())
        num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        trained = "" if num_trained == num_all else f", {num_trained:,} of them trained"
        ranks, steps = self.layout.world_size, self.step_scheduler.planned_steps
        log.info(
            "%s with %s parameters%s; %d rank%s, %s; %s steps",
            type(model).__name__,
            f"{num_all:,}",
            trained,
            ranks,
            "" if ranks == 1 else "s",
            choose_strategy(self.config.distributed.strategy, ranks),
            "unknown" if steps is None else steps,
        )

    def build_optimizer(self) -> torch.optim.Optimizer:
        """The ``optimizer`` section over all parameters that need gradients."""
        section, params = self.config.optimizer, trainable([self.model])
        if isinstance(section, Target):
            optimizer: torch.optim.Optimizer = build(section, params=params)
            return optimizer
        return adamw(params, lr=section.lr, betas=section.betas, eps=section.eps, weight_decay=section.weight_decay)

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
        if isinstance(loss_fn, nn.Module):
            loss_fn = loss_fn.to(self.layout.device)
            # A module without parameters has nothing to be saved; its bound method is no state.
            return loss_fn if loss_fn.state_dict() else loss_fn.forward
        return loss_fn  # type: ignore[no-any-return]

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
        )
        checkpointer.open()
        return checkpointer

    def build_assets(self) -> dict[str, HFAssets]:
        """What an export of ``model`` needs beside its weights; nothing for a model that is not transformers'."""
        section = self.config.model
        if self.model_config is None or isinstance(section, Target):
            return {}
        base_dir = base_directory(section.from_pretrained) if section.from_pretrained else None
        assets = HFAssets.from_model(self.model, tokenizer=self.tokenizer, base_dir=base_dir)
        assets.validate()
        return {"model": assets}

    # ---------------------------------------------------------------- loop

    def run(self) -> None:
        """Train from where the run stands to its end. Raises :class:`Stopped` when a signal came in."""
        if self.step_scheduler.is_finished():
            self.already_complete()
            return
        while not self.step_scheduler.is_finished():
            self.run_epoch()
        self.end()

    def run_epoch(self) -> None:
        """Train on the rest of the current epoch, or until the run is over."""
        for batch in self.dataloader:
            if self.step_scheduler.is_beyond_last_epoch(batch.epoch):
                self.step_scheduler.end_early()
                return
            control = self.agree_on(batch)
            if control.stop:
                self.stop()
            due = self.step(batch, control)
            if due.validate or due.save:
                self.validate_and_save(validate=due.validate, save=due.save, last=due.last)
            if due.last:
                return

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
        scale = self.layout.dp_size / control.num_label_tokens
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.layout.device)
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            with gradient_sync(self.model, enabled=number == len(batch.micro_batches)):
                loss = self.micro_batch_loss(micro_batch)
                (loss * scale).backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.detach()
        grad_norm = self.clip_gradients()
        if not math.isfinite(grad_norm):
            log.warning("step %d: the gradient norm is %s, no update", self.step_scheduler.step + 1, grad_norm)
            self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss_sum.item(), grad_norm

    def micro_batch_loss(self, micro_batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of one micro-batch, summed over its labels; 0-dim, on the device."""
        self.check_length(longest_sample(micro_batch))
        rows = self.row_layout(micro_batch) if self.row_layout is not None else micro_batch
        inputs = {name: self.on_device(value) for name, value in rows.items() if name != "labels"}
        if self.loss_of is None:
            with self.computing():
                output = self.model(**inputs, **self.forward_options)
            return next_token_loss(logits_of(output), self.on_device(rows["labels"]), self.loss_fn)
        positions, targets = labelled_positions(rows["labels"])
        with self.computing(), self.loss_of(self.on_device(positions), self.on_device(targets)):
            output = self.model(**inputs, **self.forward_options)
        return logits_of(output)

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """*tensor* where the model is."""
        return tensor.to(self.layout.device, non_blocking=True)

    def check_length(self, num_tokens: int) -> None:
        """:class:`RecipeError` for a sample, padding included, that is longer than the model's context."""
        if self.model_config is not None:
            check_context(self.model_config, num_tokens, f"a sample of step {self.step_scheduler.step + 1}")

    def clip_gradients(self) -> float:
        """Scale all gradients together to ``clip_grad_norm``; returns their norm before that."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = full_value(nn.utils.get_total_norm(gradients))
        limit = self.config.clip_grad_norm
        if limit is not None and norm > limit:
            torch._foreach_mul_(gradients, limit / (norm + 1e-6))
        return norm

    def validate(self) -> Validation | None:
        """The mean loss over the validation set, without a trace in the training: no gradient, no random number.

        None when a stop was asked for: it is looked for at every batch.
        """
        assert self.validation_batches is not None
        loss, num_label_tokens = 0.0, 0.0
        self.model.eval()
        try:
            with torch.no_grad(), self.rng.preserved():
                for batch in self.validation_batches():
                    sums = self.sum_over_ranks(*self.validation_sums(batch), bool(self.stop_request.requested))
                    if sums[2] > 0:
                        return None
                    loss, num_label_tokens = loss + sums[0], num_label_tokens + sums[1]
        finally:
            self.model.train()
            reshard(self.model)
        return Validation(loss / num_label_tokens if num_label_tokens else math.nan, int(num_label_tokens))

    def validation_sums(self, batch: GlobalBatch) -> tuple[float, int]:
        """This rank's summed loss and label tokens of one batch."""
        loss = sum(self.micro_batch_loss(micro_batch).double().item() for micro_batch in batch.micro_batches)
        return loss, sum(num_label_tokens(micro_batch["labels"]) for micro_batch in batch.micro_batches)
