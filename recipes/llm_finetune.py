"""Supervised fine-tuning of a causal language model.

Reads from top to bottom: :meth:`LLMFinetune.build` makes the attributes; the loop over global batches, the step and all
that is not a language model's own come from :class:`~automodel_ckpt.recipes.base.FinetuneRecipe`. To train something
else as well, subclass it, give it another attribute in ``build``, and it is saved and restored with the rest.
"""

from __future__ import annotations

import logging
import os
from typing import Any, ClassVar

from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from automodel_ckpt.config.schema import ModelConfig, Target
from automodel_ckpt.config.targets import build
from automodel_ckpt.data.collate import PadCollator
from automodel_ckpt.data.packing import PackedDataset, RowLayout
from automodel_ckpt.distributed.context_parallel import check_context_heads
from automodel_ckpt.distributed.tensor_parallel import check_heads
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.build import check_context, check_vocabulary, load_model_config, require_local
from automodel_ckpt.models.probe import attention_of, keeps_samples_apart
from automodel_ckpt.models.vocabulary import set_size, wanted_size
from automodel_ckpt.recipes.base import FinetuneRecipe, Rows

log = logging.getLogger("automodel_ckpt")


class LLMFinetune(FinetuneRecipe):
    """Trains ``model`` on ``dataset`` to predict the next token wherever there is a label."""

    auto_class: ClassVar[Any] = AutoModelForCausalLM
    task_type: ClassVar[str | None] = "CAUSAL_LM"

    def build(self) -> None:
        """The tokenizer, the data, the model, and what updates it."""
        self.tokenizer = self.preprocessor = self.build_tokenizer()
        self.model_config = self.check_model_config()
        self.dataloader = self.build_dataloader(self.config.dataset)
        self.validation_batches = self.build_validation()
        self.step_scheduler = self.build_step_scheduler()
        self.model = self.build_model()
        self.optimizer = self.build_optimizer()
        self.lr_scheduler = self.build_lr_scheduler()
        self.loss_fn = self.build_loss_fn()

    def build_tokenizer(self) -> Any:
        """The ``tokenizer`` section, else the pretrained model's own; None where there is neither."""
        section, model = self.config.tokenizer, self.config.model
        if isinstance(self.config.processor, Target) or self.config.processor.from_pretrained is not None:
            raise RecipeError(
                "a language model has a tokenizer, not a processor",
                where="processor",
                value=self.config.processor,
                remedy="give a tokenizer section instead, or train a vision-language model with recipe: vlm_finetune",
            )
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
        size = wanted_size(model.vocab_size, self.tokenizer)
        if size is not None and model.from_config is not None:
            set_size(found, size)
        check_vocabulary(found, self.tokenizer, size=size)
        check_heads(found, self.layout.sizes.tp)
        check_context_heads(found, self.layout.sizes.cp, self.layout.sizes.tp)
        for name in ("dataset", "validation_dataset"):
            section = getattr(self.config, name)
            seq_length = section.kwargs.get("seq_length") if section is not None else None
            if seq_length is not None:
                check_context(found, int(seq_length), f"{name}.seq_length")
        return found

    def build_dataset(self, section: Target) -> Any:
        """The data set that a section names; with a ``packed_sequence`` section in packs."""
        return self.packed(build(section, tokenizer=self.tokenizer))

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
        return PadCollator(pad_token_id, self.row_multiple)

    def choose_row_layout(self, model: nn.Module) -> Rows | None:
        """How samples share rows, if the model keeps them apart; None: each is padded to the longest."""
        config, packed = self.config.dataloader, self.config.packed_sequence is not None
        if not (config.padding_free or packed):
            return None
        attention = attention_of(model)
        one_row = "flash" in attention
        asked = self.asked(model)
        apart = keeps_samples_apart(asked, one_row, self.forward_options, self.row_multiple, self.layout.device)
        if not self.on_all_ranks(apart):
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
        return RowLayout(hidden_size, one_row, self.row_multiple)
