"""Conversations with images, rendered by the processor's chat template with a placeholder for each image.

The assistant's text is located in the rendered text (:mod:`.chat`). The processor converts the texts and images of a
micro-batch to tensors (:mod:`.image_collate`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from automodel_ckpt.data.arguments import at_most, require_choice
from automodel_ckpt.data.chat import CHOICES, ChatTemplate, read_template
from automodel_ckpt.data.images import open_image, pillow
from automodel_ckpt.data.messages import UnusableSample, turns_of
from automodel_ckpt.data.source import Source
from automodel_ckpt.data.training_templates import select_template
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)

_INLINE = ("image", "path", "url")
"""The keys of an image entry that may contain the image."""


@dataclass(frozen=True)
class ImageText:
    """A conversation as text with a placeholder for each of its *images*, which are Pillow images.

    *where* is the location of the sample, for error messages. *seq_length* and *truncation* are those of
    :func:`conversations`.
    """

    text: str = field(repr=False)
    images: list[Any] = field(repr=False)
    labeled_spans: list[tuple[int, int]]
    """The (start, end) characters of the assistant's text."""
    where: str = "a sample"
    seq_length: int | None = None
    truncation: str = "error"


def conversations(
    processor: Any,
    path: str | list[str],
    seq_length: int = 2048,
    messages_field: str = "messages",
    images_field: str = "images",
    chat_template: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
    learn: Literal["all", "last"] = "all",
    truncation: Literal["error", "right"] = "error",
    max_samples: int | None = None,
    name: str | None = None,
    split: str = "train",
) -> ImageConversations:
    """Make one sample per conversation, with labels on the assistant's text and the end of its turns.

    The content of a message is text, or a list of ``{"type": "text", "text": ...}`` and ``{"type": "image", "image":
    ...}``. An image is a path; relative paths start at the directory of the data file. A row may also have a field
    *images_field* with one image or a list, as paths or as an image column of ``datasets``. These images fill the
    entries ``{"type": "image"}`` in order; if there are no entries, they are put before the first message of the user.
    With *learn* ``last``, only the assistant's last turn has labels.

    Images are opened when a sample is read. A sample of more than *seq_length* tokens, including those of its images,
    is then rejected with its location. With *truncation* ``right`` it is truncated, or skipped if truncation would cut
    an image or leave no label; skipped samples have no loss and are logged.
    """
    require_choice("learn", learn, ("all", "last"))
    require_choice("truncation", truncation, ("error", "right"))
    pillow()
    template = ImageChatTemplate(
        processor, _template(processor, chat_template), dict(template_kwargs or {}), learn == "last"
    )
    log.info("%s: the assistant's tokens are found by %s", path, template.method)
    return ImageConversations(
        Source.of(path, name, split),
        template,
        messages_field,
        images_field,
        seq_length,
        truncation,
        max_samples,
    )


class ImageConversations:
    """The map-style data set of :func:`conversations`. Indexing raises :class:`RecipeError` for an unusable sample."""

    def __init__(
        self,
        source: Source,
        template: ImageChatTemplate,
        messages_field: str,
        images_field: str,
        seq_length: int,
        truncation: str,
        max_samples: int | None,
    ) -> None:
        source.require([messages_field])
        self.source = source
        self.template = template
        self.messages_field = messages_field
        self.images_field = images_field if source.has_field(images_field) else None
        self.seq_length = seq_length
        self.truncation = truncation
        self.num_samples = at_most(max_samples, source.num_rows)
        self.folder = source.folder

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> ImageText:
        row = self.source.row(index)
        images = []
        if self.images_field is not None:
            images = _as_list(row[self.images_field])
        try:
            return image_text(
                self.template,
                row[self.messages_field],
                images,
                self.folder,
                where=f"sample {index} of {self.source.path}",
                seq_length=self.seq_length,
                truncation=self.truncation,
            )
        except UnusableSample as error:
            where = f"sample {index} ({self.source.place(index)})"
            raise RecipeError(
                error.what, where=where, value=error.value, hint=error.hint
            ) from error


def image_text(
    template: ImageChatTemplate,
    conversation: Any,
    images: Sequence[Any],
    folder: Path = Path(),
    **options: Any,
) -> ImageText:
    """Make a sample of a *conversation* and the *images* for its empty image entries.

    Relative paths of images start at *folder*; *options* are further fields of :class:`ImageText`. Raises
    :class:`UnusableSample` if the conversation has no assistant text or its images do not match.
    """
    turns, values = _assign_images(turns_of(conversation), list(images))
    _check_placeholders(turns, template.placeholders)
    text, labeled_spans = template.render(turns)
    if not labeled_spans:
        roles = ", ".join(str(turn["role"]) for turn in turns)
        raise UnusableSample(
            "this conversation has no assistant text to train on", roles, "remove it"
        )
    opened = [open_image(value, folder) for value in values]
    return ImageText(text, opened, labeled_spans, **options)


@dataclass(frozen=True)
class ImageChatTemplate(ChatTemplate):
    """A processor's chat template: :attr:`tokenizer` is the processor."""

    @property
    def placeholders(self) -> set[str]:
        """The texts that the processor replaces by an image."""
        found = set()
        for name in ("image_token", "boi_token"):
            token = getattr(self.tokenizer, name, None)
            if isinstance(token, str) and token:
                found.add(token)
        return found

    def render(self, turns: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation. Returns the text and the (start, end) characters of the assistant's text in it."""
        if self.has_markers:
            text, spans = self._marks(turns, None)
            if self.last_only:
                spans = spans[-1:]
            return text, spans
        whole = self._apply(turns, None, tokenize=False)
        spans = []
        for number in self._labeled_turns(turns):
            before, after = self._prefixes(turns, None, number, whole)
            spans.append((len(before), len(after)))
        return whole, spans

    @property
    def _special_tokens(self) -> dict[str, Any]:
        processor: Any = self.tokenizer
        return dict(processor.tokenizer.special_tokens_map)


def _template(processor: Any, given: str | None) -> str:
    if given not in CHOICES:
        return read_template(str(given))
    own = getattr(processor, "chat_template", None) or getattr(
        processor.tokenizer, "chat_template", None
    )
    if isinstance(own, dict):
        own = own.get("default")
    if not isinstance(own, str):
        raise RecipeError(
            "the processor has no chat template",
            where="dataset.chat_template",
            value=type(processor).__name__,
            hint="set a template or the path of a template file; processors of instruct models come with one",
        )
    return select_template(own, given)


def _assign_images(
    turns: list[dict[str, Any]], images: list[Any]
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Assign images to the image entries. Returns turns with empty image entries, and the images in their order.

    Raises :class:`UnusableSample` if the number of *images* does not match the empty image entries.
    """
    turns = [{**turn, "content": _parts(turn.get("content"))} for turn in turns]
    entries = []
    for turn in turns:
        entries += [part for part in turn["content"] if part.get("type") == "image"]
    if images and not entries:
        entries = [{"type": "image"} for _ in images]
        of_user = [turn for turn in turns if turn["role"] == "user"]
        first = of_user[0] if of_user else turns[0]
        first["content"] = [*entries, *first["content"]]
    inline = [_inline_image(entry) for entry in entries]
    num_empty = sum(value is None for value in inline)
    if num_empty != len(images):
        num_entries = "1 entry" if num_empty == 1 else f"{num_empty} entries"
        num_images = "1 image" if len(images) == 1 else f"{len(images)} images"
        raise UnusableSample(
            "the number of images does not match the number of image entries",
            f"{num_entries} for {num_images}",
            'provide one image for each entry {"type": "image"}, or remove these entries',
        )
    rest = iter(images)
    values = [next(rest) if value is None else value for value in inline]
    bare = [{**turn, "content": _without_inline(turn["content"])} for turn in turns]
    return bare, values


def _inline_image(entry: dict[str, Any]) -> Any:
    """Return the image in an image entry; None if the entry is empty."""
    for key in _INLINE:
        if key in entry:
            return entry[key]
    return None


def _without_inline(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copy the *parts* of a content, with empty image entries."""
    bare = []
    for part in parts:
        is_image = part.get("type") == "image"
        bare.append({"type": "image"} if is_image else part)
    return bare


def _check_placeholders(turns: list[dict[str, Any]], placeholders: set[str]) -> None:
    """Raise :class:`UnusableSample` if a text contains a placeholder, which the processor would replace by an image."""
    for placeholder in sorted(placeholders):
        for turn in turns:
            for part in turn["content"]:
                if placeholder not in str(part.get("text", "")):
                    continue
                raise UnusableSample(
                    "a message contains the processor's placeholder for an image",
                    placeholder,
                    'remove it: images come first in their question; or write {"type": "image"} where each belongs',
                )


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return content
    if not content:
        return []
    return [{"type": "text", "text": str(content)}]


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
