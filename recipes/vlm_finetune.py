"""Supervised fine-tuning of a model of images, audio and text on conversations.

:meth:`VLMFinetune.build` creates the attributes. Everything that is not specific to vision-language models, from the
process groups to the training loop, is in :class:`~automodel_ckpt.training.recipe.Recipe`.

Needs the packages of the extra ``vision``. Without torchvision images are prepared with Pillow, and a processor's part
for videos is left out (:mod:`automodel_ckpt.models.processor`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from automodel_ckpt.config.callables.plugins import build, build_function
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.data.image_collate import ImageTextCollator
from automodel_ckpt.data.media.image_packing import PackCollator, PackedImages, measure
from automodel_ckpt.data.media.media_files import AUDIO, media_of_data, usual_media
from automodel_ckpt.data.mixture import for_each_source
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.interface import AutoMultimodalModel, image_token_ids
from automodel_ckpt.training.loop import TrainingLoop
from automodel_ckpt.training.model.sections import row_multiple
from automodel_ckpt.training.parts.preprocessors import build_processor
from automodel_ckpt.training.recipe import Recipe


class VLMLoop(TrainingLoop):
    """Trains a model of images, audio and text."""

    # Such as the last layers of a LLaVA vision tower: their features are not used.
    rejects_unused_parameters = True


class VLMFinetune(Recipe):
    """Trains ``model`` on the conversations of ``dataset`` to give the assistant's answers."""

    auto_class = AutoMultimodalModel
    packs_images = True
    loop_class = VLMLoop

    def check_sections(self) -> None:
        super().check_sections()
        tokenizer = self.config.tokenizer
        if (
            tokenizer is None
            or isinstance(tokenizer, Target)
            or tokenizer.from_pretrained is not None
        ):
            raise RecipeError(
                "a vision-language model's tokenizer is part of its processor",
                where="tokenizer",
                value="a tokenizer section",
            )

    def build(self) -> None:
        """Create the processor, the data, the model, and what updates it."""
        self.processor = self.preprocessor = self.build_processor()
        self.media = usual_media(self.processor)
        self.build_training()

    def build_processor(self) -> Any:
        """Build the ``processor`` section, else the pretrained model's own processor."""
        return build_processor(self.config)

    def build_dataset(self, section: Target) -> Any:
        """Build the data set that a section names; in packs, if there is a ``packed_sequence`` section."""
        dataset = build(section, processor=self.processor, tokenizer=self.processor.tokenizer)
        # For the collator of this data set, which is built next.
        self.media = media_of_data(dataset, self.processor)
        packing = self.config.packed_sequence
        if packing is None:
            return dataset
        if AUDIO in self.media:
            raise RecipeError(
                "samples with audio cannot be packed",
                where="packed_sequence",
                value=f"size: {packing.size}; the data may have: {', '.join(sorted(self.media))}",
                hint="remove the key",
            )
        return for_each_source(dataset, partial(self._packed, packing.size))

    def _packed(self, size: int, dataset: Any) -> PackedImages:
        num_workers = self.config.dataloader.num_workers
        measured = measure(dataset, self._image_collator(), num_workers)
        return PackedImages(measured, size)

    def build_collate_fn(self) -> Any:
        """Build the ``dataloader.collate_fn`` section, else a collator for conversations with images."""
        section = self.config.dataloader.collate_fn
        if section is not None:
            tokenizer = self.processor.tokenizer
            return build_function(
                "dataloader.collate_fn", section, processor=self.processor, tokenizer=tokenizer
            )
        if self.config.packed_sequence is not None:
            return PackCollator(self._image_collator())
        return self._image_collator(row_multiple(self.config, self.layout))

    def _image_collator(self, pad_to_multiple_of: int | None = None) -> ImageTextCollator:
        ids = image_token_ids(self.model_config, self.processor)
        return ImageTextCollator(self.processor, ids, pad_to_multiple_of, self.media)
