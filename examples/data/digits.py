"""1,797 scans of handwritten digits that come with scikit-learn, as conversations, and a small processor for them.

The scans are the UCI "Optical Recognition of Handwritten Digits" test set (E. Alpaydin, C. Kaynak), 8 by 8 pixels of 17
gray levels. Nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import LlavaProcessor

from automodel_ckpt.data.collate import at_most, require_choice
from automodel_ckpt.data.conversations.messages import UnusableSample
from automodel_ckpt.data.media.image_conversations import (
    ImageChatTemplate,
    ImageText,
    RowContent,
    image_text,
)
from automodel_ckpt.data.media.media_files import pillow
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.examples.data.python_docs import train_tokenizer

QUESTION = "Which digit is this?"
IMAGE_PIXELS = 32
PATCH_PIXELS = 8
NUM_HELD_OUT = 300

_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def processor(vocab_size: int = 512) -> LlavaProcessor:
    """Make a LLaVA processor for images of 32 by 32 pixels in 16 patches.

    Its tokenizer has *vocab_size* entries and is trained on the Python documentation.
    """
    from transformers import CLIPImageProcessorPil

    tokenizer = train_tokenizer(vocab_size)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<image>", "<|user|>", "<|assistant|>"]}
    )
    size = {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}
    images = CLIPImageProcessorPil(size=size, crop_size=size, do_center_crop=False)
    return LlavaProcessor(  # type: ignore[no-untyped-call]
        images,
        tokenizer,
        patch_size=PATCH_PIXELS,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",  # noqa: S106
        chat_template=_TEMPLATE,
    )


def scans(
    processor: Any, split: str = "train", max_samples: int | None = None
) -> DigitConversations:
    """Make a conversation of each scan, with :data:`QUESTION` and the digit as the answer.

    *split* is ``train``, or ``validation``: a fixed set of 300 scans that are not in ``train``.
    """
    require_choice("split", split, ("train", "validation"))
    return DigitConversations(processor, split, max_samples)


class DigitConversations:
    """The map-style data set of :func:`scans`."""

    def __init__(self, processor: Any, split: str, max_samples: int | None = None) -> None:
        self.template = ImageChatTemplate(processor, processor.chat_template, {}, False)
        self.images, self.digits = _load(split)
        self.split = split
        self.num_samples = at_most(max_samples, len(self.digits))

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> ImageText:
        where = f"scan {index} ({self.split})"
        turns = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]},
            {"role": "assistant", "content": [{"type": "text", "text": str(self.digits[index])}]},
        ]
        try:
            return image_text(self.template, RowContent(turns, [self.image(index)]), where=where)
        except UnusableSample as error:
            raise RecipeError(
                error.what, where=where, value=error.value, hint=error.hint
            ) from error

    def image(self, index: int) -> Any:
        """Convert a scan to a Pillow image, black on white."""
        levels = self.images[index] * (255 / 16)  # 0 to 16, where 16 is ink
        gray = (255 - levels).astype(np.uint8)
        scale = IMAGE_PIXELS // gray.shape[0]
        pixel = np.ones((scale, scale), dtype=np.uint8)
        enlarged = np.kron(gray, pixel)
        return pillow().fromarray(enlarged).convert("RGB")


def _load(split: str) -> tuple[np.ndarray[Any, Any], list[int]]:
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise RecipeError(
            "the digits data set requires scikit-learn",
            where="dataset",
            value=str(error),
            hint="install it: pip install scikit-learn",
        ) from error
    bunch: Any = load_digits()
    # RandomState, not default_rng: NumPy keeps its stream unchanged (NEP 19), so the split is
    # fixed.
    order = np.random.RandomState(0).permutation(len(bunch.target))
    chosen = order[:NUM_HELD_OUT] if split == "validation" else order[NUM_HELD_OUT:]
    return bunch.images[chosen], [int(digit) for digit in bunch.target[chosen]]
