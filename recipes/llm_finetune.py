"""Supervised fine-tuning of a causal language model.

:meth:`LLMFinetune.build` creates the attributes. Everything that is not specific to language models, from the process
groups to the training loop, is in :class:`~automodel_ckpt.training.recipe.Recipe`. To train something else as well,
derive a class from this one and give it another attribute in ``build``: it is saved and restored with the rest.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any, ClassVar

from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_ckpt.config.callables.plugins import build, build_function
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.data.batches.packing import PackedDataset
from automodel_ckpt.data.collate import PadCollator
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.interface import naming_files
from automodel_ckpt.models.inspect.repository import from_library_first
from automodel_ckpt.training.model.sections import preprocessor_options, row_multiple
from automodel_ckpt.training.parts.preprocessors import (
    check_vocabulary_file,
    find_preprocessor,
    reading,
)
from automodel_ckpt.training.recipe import Recipe

_TOKENIZER_HINT = (
    "name a directory with tokenizer files; a Hub name needs the network or a filled cache, and for a model that asks "
    "for it a login (hf auth login); for data that is tokenized already: tokenizer: null"
)


class LLMFinetune(Recipe):
    """Trains ``model`` on ``dataset`` to predict the next token wherever there is a label."""

    auto_class: ClassVar[Any] = AutoModelForCausalLM
    task_type = "CAUSAL_LM"
    shares_rows = True

    def build(self) -> None:
        """Create the tokenizer, the data, the model, and what updates it."""
        self.tokenizer = self.preprocessor = self.build_tokenizer()
        self.build_training()

    def check_sections(self) -> None:
        super().check_sections()
        processor = self.config.processor
        if isinstance(processor, Target) or processor.from_pretrained is not None:
            raise RecipeError(
                "a language model has a tokenizer, not a processor",
                where="processor",
                value="a processor section",
                hint="give a tokenizer section instead, or train a vision-language model with recipe: vlm_finetune",
            )

    def build_tokenizer(self) -> Any:
        """Build the ``tokenizer`` section, or else the pretrained model's own tokenizer.

        Returns None without both, and for ``null``. Raises :class:`RecipeError` if it cannot be read.
        """
        section = self.config.tokenizer
        if section is None:
            return None
        if isinstance(section, Target):
            return check_vocabulary_file(build(section), "tokenizer")
        name, where = find_preprocessor(self.config, "tokenizer")
        if name is None:
            return None
        repository = preprocessor_options(self.config, name, where)
        read: Any = AutoTokenizer.from_pretrained
        with reading("tokenizer", name, where, repository, _TOKENIZER_HINT):
            found = from_library_first(read, os.path.expanduser(name), repository)
        with naming_files(
            "transformers cannot use this tokenizer", f"tokenizer_config.json of {name}"
        ):
            found(["a"])  # its settings are read by the first call
        return check_vocabulary_file(found, where)

    def build_dataset(self, section: Target) -> Any:
        """Build the data set that a section names; in packs, if there is a ``packed_sequence`` section."""
        dataset = build(section, tokenizer=self.tokenizer)
        packing = self.config.packed_sequence
        if packing is None:
            return dataset
        from automodel_ckpt.data.mixture import for_each_source

        return for_each_source(dataset, partial(PackedDataset, size=packing.size))

    def build_collate_fn(self) -> Any:
        """Build the ``dataloader.collate_fn`` section, else the :meth:`usual_collate_fn`."""
        section = self.config.dataloader.collate_fn
        if section is not None:
            return build_function("dataloader.collate_fn", section, tokenizer=self.tokenizer)
        return self.usual_collate_fn()

    def usual_collate_fn(self) -> Any:
        """Build the collator of a recipe file that names none, which pads to the longest sample."""
        # Padding has no label and is masked, so any id of the vocabulary will do.
        pad_token_id = 0
        for name in ("pad_token_id", "eos_token_id"):
            token = getattr(self.tokenizer, name, None)
            # Some tokenizers have a list of end tokens.
            if isinstance(token, int):
                pad_token_id = token
                break
        return PadCollator(pad_token_id, row_multiple(self.config, self.layout))
