"""Rows that several samples with images share: whether a model keeps their attention and their images separate."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from automodel_ckpt.data.batches.packing import IS_TOKEN
from automodel_ckpt.data.image_collate import ImageTextCollator
from automodel_ckpt.data.media.image_conversations import ImageText
from automodel_ckpt.data.media.image_packing import ImagePack, ImageRowLayout, PackCollator
from automodel_ckpt.data.media.media_files import pillow
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.attention.by_document import Answer
from automodel_ckpt.models.inspect.interface import (
    logits_of,
    side_effect_free,
)

log = logging.getLogger("automodel_ckpt")

_PIXELS = 64


@dataclass(frozen=True)
class RowProbe:
    """Runs a model on samples with and without images, alone in a row and in a row that they share."""

    probed: Any
    """The model, as :class:`~automodel_ckpt.training.model.probes.ProbedModel`."""
    collate: ImageTextCollator
    rows: ImageRowLayout

    def keeps_samples_apart(self) -> Answer:
        """Whether samples have the same logits in a row alone and after another sample, whatever that one is.

        The logits may differ by a tenth of the effect that attention to the sample before has. Rounding is far below
        this in every dtype. The answer is false if the forward pass fails.
        """
        # The image is at another place than in the samples before, and the last sample has none: a model may look up
        # images at the positions of the first sample.
        last = [self._sample(1, "words before it", is_first=False), self._without_image()]
        first = self._sample(2, "the first text")
        other = self._sample(3, "another text that is longer")
        try:
            with side_effect_free(self.probed.from_tokens):
                alone = torch.cat([self._logits([sample]) for sample in last])
                length = len(alone)
                after_first = self._logits([first, *last])[-length:]
                after_other = self._logits([other, *last])[-length:]
                crossed = self._logits([first, *last], is_crossed=True)[-length:]
        except Exception as error:
            log.debug("could not probe the model for packed images", exc_info=True)
            return Answer.of_error(error)
        allowed = 0.1 * _distance(crossed, alone)
        largest = max(_distance(after_first, alone), _distance(after_other, alone))
        return Answer(largest <= allowed)

    def _without_image(self) -> ImageText:
        """A sample without an image, or with one if the processor rejects text alone."""
        sample = self._sample(None, "no image")
        try:
            self.collate.num_tokens(sample)
        except RecipeError:
            return self._sample(4, "the last text")
        return sample

    def _sample(self, seed: int | None, text: str, *, is_first: bool = True) -> ImageText:
        """Make a sample with an image of random pixels before or after the text; *seed* None: without an image."""
        image = None
        if seed is not None:
            generator = np.random.default_rng(seed)
            pixels = generator.integers(0, 256, (_PIXELS, _PIXELS, 3), dtype=np.uint8)
            image = pillow().fromarray(pixels)
        return self.collate.unlabeled(image, text, image_is_first=is_first)

    def _logits(self, samples: list[ImageText], *, is_crossed: bool = False) -> Tensor:
        """The logits [T, V] of samples in one row, without the logits of its padding.

        With *is_crossed*, the positions of the text do not restart, so that attention crosses the samples.
        """
        lengths = [self.collate.num_tokens(sample) for sample in samples]
        batch = PackCollator(self.collate)([ImagePack(samples, lengths)])
        inputs = dict(self.rows(batch))
        positions = inputs["position_ids"]
        if is_crossed:
            continued = positions.clone()
            # The first of several kinds of positions belongs to the text.
            of_text = continued[0] if continued.ndim == 3 else continued
            of_text[:] = torch.arange(of_text.shape[-1])
            inputs["position_ids"] = continued
        del inputs["labels"]
        inputs.pop(IS_TOKEN, None)
        device = self.probed.layout.device
        moved = {name: tensor.to(device) for name, tensor in inputs.items()}
        with self.probed.compute():
            output = self.probed.from_tokens(**moved, **self.probed.options)
        return logits_of(output)[0, : sum(lengths)].float()


def _distance(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max())
