"""Data of the measurements: samples with the lengths of SQuAD, and an image processor of any size."""

import math
from typing import Any

import numpy as np

_SIGMA = 0.42
_ANSWER_TOKENS = (2, 9)


class ShortAnswers:
    """Random tokens with the lengths of questions about a paragraph, and labels on a short answer at the end."""

    def __init__(
        self, num_samples: int, longest: int, mean: float, vocab_size: int, tokenizer: Any = None
    ) -> None:
        """Lengths have a log-normal distribution with this *mean*, from 8 tokens to the *longest*."""
        generator = np.random.default_rng(0)
        # The mean of a log-normal distribution is exp(location + sigma**2 / 2).
        location = math.log(mean) - _SIGMA**2 / 2
        drawn = generator.lognormal(location, _SIGMA, num_samples)
        self.lengths = np.clip(drawn, 8, longest).astype(int)
        self.answers = generator.integers(*_ANSWER_TOKENS, num_samples)
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        length = int(self.lengths[index])
        prompt_length = length - int(self.answers[index])
        generator = np.random.default_rng([1, index])
        tokens = generator.integers(0, self.vocab_size, length).tolist()
        labels = [-100] * prompt_length + tokens[prompt_length:]
        return {"input_ids": tokens, "labels": labels}


_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def image_processor(image_pixels: int, patch_pixels: int) -> Any:
    """A LLaVA processor for square images of any size, with the small tokenizer of the Python documentation."""
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    from automodel_ckpt.examples.data.digits import processor

    size = {"height": image_pixels, "width": image_pixels}
    tokenizer = processor(512).tokenizer
    make: Any = LlavaProcessor
    return make(
        CLIPImageProcessorPil(size=size, crop_size=size, do_center_crop=False),
        tokenizer,
        patch_size=patch_pixels,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",  # noqa: S106
        chat_template=_TEMPLATE,
    )
