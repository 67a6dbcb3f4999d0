"""Conversations about images of random pixels, for tests and benchmarks without data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from automodel_ckpt.data.collate import at_most
from automodel_ckpt.data.conversations.messages import UnusableSample
from automodel_ckpt.data.media.image_conversations import (
    ImageChatTemplate,
    ImageOptions,
    ImageText,
    RowContent,
    image_text,
)
from automodel_ckpt.data.media.media_files import pillow
from automodel_ckpt.errors import RecipeError

_WORDS = ("the", "red", "square", "under", "a", "small", "circle", "shows", "many", "dark", "lines")
_MAX_PIXELS = 2**26


def mock_images(
    processor: Any,
    num_samples: int = 10,
    num_images_per_sample: int = 1,
    image_size: tuple[int, int] = (256, 256),
    prompt: str = "Describe this image.",
    responses: list[str] | None = None,
    num_words: int = 256,
    seed: int = 0,
    seq_length: int | None = None,
    truncation: Literal["error", "right", "skip"] = "error",
    chat_template: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
    answer_prefix: str = "",
    max_samples: int | None = None,
) -> MockImages:
    """Make conversations of one question about images of random pixels, and an answer of random words.

    *image_size* is (width, height) in pixels. The answers are *responses*, repeated in their order, or *num_words*
    random words. Sample i depends on (seed, i) only, so that two data sets with the same seed have the same samples.
    *seq_length*, *truncation*, *chat_template* and *answer_prefix* are those of
    :func:`~automodel_ckpt.data.vlm.conversations`. Raises :class:`RecipeError` for sizes that are not positive.
    """
    sizes = {
        "num_samples": num_samples,
        "num_images_per_sample": num_images_per_sample,
        "num_words": num_words,
    }
    _check_sizes(sizes, image_size, seed)
    options = ImageOptions(
        seq_length, truncation, chat_template, template_kwargs or {}, answer_prefix=answer_prefix
    )
    return MockImages(
        options.template(processor),
        options,
        image_size,
        num_images_per_sample,
        prompt,
        list(responses or []),
        num_words,
        seed,
        at_most(max_samples, num_samples),
    )


def _check_sizes(sizes: Mapping[str, int], image_size: tuple[int, int], seed: int) -> None:
    """Raise :class:`RecipeError` for sizes below 1, images that are too large, and a negative seed."""
    for name, size in {**sizes, "image_size": min(image_size)}.items():
        if size < 1:
            raise RecipeError(
                "a size is not positive", where=f"dataset.{name}", value=size, hint="give 1 or more"
            )
    width, height = image_size
    if width * height > _MAX_PIXELS:
        raise RecipeError(
            "the images are too large",
            where="dataset.image_size",
            value=f"{width} x {height} pixels",
            hint=f"at most {_MAX_PIXELS} pixels",
        )
    if seed < 0:
        raise RecipeError(
            "the seed is negative", where="dataset.seed", value=seed, hint="give 0 or more"
        )


class MockImages:
    """The map-style data set of :func:`mock_images`."""

    def __init__(
        self,
        template: ImageChatTemplate,
        options: ImageOptions,
        image_size: tuple[int, int],
        num_images: int,
        prompt: str,
        responses: list[str],
        num_words: int,
        seed: int,
        num_samples: int,
    ) -> None:
        self.template = template
        self.options = options
        self.image_size = image_size
        self.num_images = num_images
        self.prompt = prompt
        self.responses = responses
        self.num_words = num_words
        self.seed = seed
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> ImageText:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        generator = np.random.default_rng([self.seed, index])
        images = [self._image(generator) for _ in range(self.num_images)]
        question: list[dict[str, str]] = [{"type": "image"} for _ in images]
        question.append({"type": "text", "text": self.prompt})
        answer = [{"type": "text", "text": self._response(generator, index)}]
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        where = f"mock sample {index}"
        try:
            return image_text(
                self.template,
                RowContent(turns, images),
                where=where,
                seq_length=self.options.seq_length,
                truncation=self.options.truncation,
            )
        except UnusableSample as error:
            raise RecipeError(
                error.what, where=where, value=error.value, hint=error.hint
            ) from error

    def fingerprint(self) -> tuple[object, ...]:
        """Return a key that changes with the samples."""
        return (
            "mock_images",
            self.image_size,
            self.num_images,
            self.prompt,
            tuple(self.responses),
            self.num_words,
            self.seed,
            self.num_samples,
            repr(self.options),
            *self.template.key,
        )

    def _image(self, generator: np.random.Generator) -> Any:
        width, height = self.image_size
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        return pillow().fromarray(pixels)

    def _response(self, generator: np.random.Generator, index: int) -> str:
        if self.responses:
            return self.responses[index % len(self.responses)]
        numbers = generator.integers(0, len(_WORDS), self.num_words)
        return " ".join(_WORDS[number] for number in numbers)
