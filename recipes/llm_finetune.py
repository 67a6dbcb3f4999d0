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
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_ckpt.config.schema import ModelConfig, Target
from automodel_ckpt.config.targets import build
from automodel_ckpt.data.collate import PadCollator
from automodel_ckpt.data.packing import PackedDataset, RowLayout
from automodel_ckpt.distributed.agree import on_all_ranks
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.attention import attend_by_document, attend_by_mask
from automodel_ckpt.models.build import first_line
from automodel_ckpt.models.probe import attention_of, keeps_samples_apart
from automodel_ckpt.recipes.base import FinetuneRecipe, Rows

log = logging.getLogger("automodel_ckpt")


class LLMFinetune(FinetuneRecipe):
    """Trains ``model`` on ``dataset`` to predict the next token wherever there is a label."""

    auto_class: ClassVar[Any] = AutoModelForCausalLM
    task_type: ClassVar[str | None] = "CAUSAL_LM"

    def build(self) -> None:
        """The tokenizer, the data, the model, and what updates it."""
        self.tokenizer = self.preprocessor = self.build_tokenizer()
        self.build_training()

    def build_tokenizer(self) -> Any:
        """The ``tokenizer`` section, else the pretrained model's own; None where there is neither, and for ``null``."""
        section = self.config.tokenizer
        if (
            isinstance(self.config.processor, Target)
            or self.config.processor.from_pretrained is not None
        ):
            raise RecipeError(
                "a language model has a tokenizer, not a processor",
                where="processor",
                value="a processor section",
                hint="give a tokenizer section instead, or train a vision-language model with recipe: vlm_finetune",
            )
        if section is None:
            return None
        if isinstance(section, Target):
            return build(section)
        name, where = self.named_or_the_models("tokenizer")
        if name is None:
            return None
        try:
            return AutoTokenizer.from_pretrained(os.path.expanduser(name), trust_remote_code=False)
        except (
            Exception
        ) as error:  # for some files the tokenizers library raises nothing more special
            raise RecipeError(
                "the tokenizer cannot be read",
                where=where,
                value=f"{name} ({first_line(error)})",
                hint="name a directory with tokenizer files; a Hub name needs the network or a filled cache, and for "
                "a model that asks for it a login (hf auth login); for data that is tokenized already: tokenizer: null",
            ) from error

    def build_dataset(self, section: Target) -> Any:
        """The data set that a section names; with a ``packed_sequence`` section in packs."""
        return self.packed(build(section, tokenizer=self.tokenizer))

    def packed(self, dataset: Any) -> Any:
        """The data set as it is, or with a ``packed_sequence`` section in packs."""
        section = self.config.packed_sequence
        if section is None:
            return dataset
        packs = PackedDataset(dataset, section.size)
        log.info(
            "packed %d samples into %d packs of %d tokens, %.2f %% of them empty",
            len(dataset),
            len(packs),
            section.size,
            100 * packs.waste,
        )
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
        apart = keeps_samples_apart(
            asked, one_row, self.forward_options, self.row_multiple, self.layout.device
        )
        if not on_all_ranks(self.layout.gloo_group, bool(apart)):
            if packed:
                raise RecipeError(
                    "this model does not keep the samples of a pack apart",
                    where="packed_sequence",
                    value=f"{type(model).__name__}, {attention} attention{apart.reason}",
                    hint="leave packed_sequence out, or use another model or attn_implementation",
                )
            log.info(
                "samples are padded to the longest: this model does not keep those apart that share a row%s",
                apart.reason,
            )
            return None
        by_document = self.attends_by_document(asked)
        if by_document:
            log.info(
                "packing samples without padding; attention is limited to each sample (%s)",
                attention,
            )
        else:
            log.info(
                "packing samples without padding; %s attention separates them by their position ids",
                attention,
            )
        hidden_size = getattr(
            self.model_config and self.model_config.get_text_config(), "hidden_size", 1024
        )
        marks_tokens = self.router_loss is not None
        return RowLayout(hidden_size, one_row or by_document, self.row_multiple, marks_tokens)

    def attends_by_document(self, asked: nn.Module) -> bool:
        """Make attention look at no pairs of tokens of different samples, where that is left to this program."""
        section = self.config.model
        left_to_us = isinstance(section, ModelConfig) and section.attn_implementation is None
        # Compiled layers would be compiled anew for each row; cut rows have an attention of their own.
        if not left_to_us or self.config.compile.enabled or self.layout.sizes.cp > 1:
            return False
        able = attend_by_document(
            asked, self.forward_options, self.row_multiple, self.layout.device
        )
        if not on_all_ranks(self.layout.gloo_group, able):
            attend_by_mask(asked)
            return False
        return True
