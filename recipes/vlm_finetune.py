"""Supervised fine-tuning of a vision-language model on conversations with images.

Reads from top to bottom: :meth:`VLMFinetune.build` makes the attributes; the loop over global batches, the step and all
that is not a vision-language model's own come from :class:`~automodel_ckpt.recipes.base.FinetuneRecipe`.

Needs what the extra ``vision`` brings. Without torchvision images are prepared with Pillow, and a processor's part for
videos is left out (:mod:`automodel_ckpt.models.processor`).
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

from transformers import AutoModelForImageTextToText

from automodel_ckpt.config.schema import Target
from automodel_ckpt.config.targets import build
from automodel_ckpt.data.image_collate import ImageTextCollator
from automodel_ckpt.errors import Problem, RecipeError
from automodel_ckpt.models.build import first_line
from automodel_ckpt.models.processor import read_processor
from automodel_ckpt.models.vision import image_token_ids
from automodel_ckpt.recipes.base import FinetuneRecipe


class VLMFinetune(FinetuneRecipe):
    """Trains ``model`` on the conversations of ``dataset`` to say what the assistant says."""

    auto_class: ClassVar[Any] = AutoModelForImageTextToText

    def build(self) -> None:
        """The processor, the data, the model, and what updates it."""
        self.check_sections_for_text()
        self.processor = self.preprocessor = self.build_processor()
        self.build_training()
        self._checked_gradients = False

    def check_sections_for_text(self) -> None:
        """:class:`RecipeError` for what acts in a recipe for text alone."""
        config = self.config
        tokenizer = config.tokenizer
        if (
            tokenizer is None
            or isinstance(tokenizer, Target)
            or tokenizer.from_pretrained is not None
        ):
            raise RecipeError(
                "a vision-language model's tokenizer is part of its processor",
                where="tokenizer",
                value="a tokenizer section",
                hint="give a processor section instead",
            )
        if config.packed_sequence is not None:
            raise RecipeError(
                "samples with images are not packed: each is padded to the longest",
                where="packed_sequence",
                value="a packed_sequence section",
                hint="leave packed_sequence out",
            )

    def build_processor(self) -> Any:
        """The ``processor`` section, else the pretrained model's own."""
        section = self.config.processor
        if isinstance(section, Target):
            return self.checked_processor(build(section), "processor")
        name, where = self.named_or_the_models("processor")
        if name is None:
            raise RecipeError(
                "there is no processor",
                where="processor",
                value=None,
                hint="give processor.from_pretrained, or a builder in processor._target_",
            )
        try:
            processor = read_processor(os.path.expanduser(name))
        except Exception as error:  # what damaged files make transformers raise
            raise RecipeError(
                "the processor cannot be read",
                where=where,
                value=f"{name} ({first_line(error, 3)})",
                hint="name a directory with processor files, and install the libraries that its processor asks for "
                "(pip install 'automodel_ckpt[vision]', and torchvision where it is named)",
            ) from error
        return self.checked_processor(processor, where)

    def checked_processor(self, processor: Any, where: str) -> Any:
        """*processor*, which has to take both text and images."""
        if hasattr(processor, "image_processor") and hasattr(processor, "tokenizer"):
            return processor
        raise RecipeError(
            "this processor does not take both text and images",
            where=where,
            value=type(processor).__name__,
            hint="name a vision-language model's processor; a language model is trained by recipe: llm_finetune",
        )

    def build_dataset(self, section: Target) -> Any:
        """The data set that a section names."""
        return build(section, processor=self.processor, tokenizer=self.processor.tokenizer)

    def build_collate_fn(self) -> Any:
        """The function from samples to a micro-batch."""
        config = self.config.dataloader
        if config.collate_fn is not None:
            return build(
                config.collate_fn, processor=self.processor, tokenizer=self.processor.tokenizer
            )
        ids = image_token_ids(self.model_config, self.processor)
        return ImageTextCollator(self.processor, ids, self.row_multiple)

    def clip_gradients(self) -> float:
        """As for any recipe; the first time, what is to be trained but takes no part in the model's output is refused.

        Such parameters (a LLaVA vision tower's last layers, whose features are not used) would leave ddp's ranks
        waiting, and take memory for nothing elsewhere.
        """
        if not self._checked_gradients:
            unused = [
                name
                for name, p in self.model.named_parameters()
                if p.requires_grad and p.grad is None
            ]
            if unused:
                raise RecipeError.all_of([_unused(unused, adapters=self.config.peft is not None)])
            self._checked_gradients = True
        return super().clip_gradients()


def _unused(names: list[str], *, adapters: bool) -> Problem:
    plain = [name.removeprefix("module.") for name in names]
    if adapters:
        plain = [name.removeprefix("base_model.model.").partition(".lora_")[0] for name in plain]
        key, hint, found = "peft.exclude_modules", "leave them out", sorted(set(plain))
    else:
        key, hint = "model.freeze", "freeze them"
        found = sorted({f"{name.rpartition('.')[0]}.*" for name in plain})
    return Problem(
        "parameters are to be trained that take no part in the model's output",
        key,
        f"{len(plain)} of them: {', '.join(plain[:5])}{' ...' if len(plain) > 5 else ''}",
        f"{hint}: {key}: [{', '.join(map(repr, found))}]",
    )
