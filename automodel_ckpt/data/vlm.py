"""Conversations with images: rendered by the processor's chat template, with a placeholder for each image.

The assistant's text is located as in :mod:`.chat`, as spans of the rendered text. The processor turns text and images
into tensors for a whole micro-batch (:mod:`.image_collate`).
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
"""The keys of an image's entry in a message that may hold it."""


@dataclass(frozen=True)
class ImageText:
    """A conversation as *text* with a placeholder for each of its *images*; *learnt* are the (start, end) characters
    that the assistant says. More than *seq_length* tokens: see :func:`conversations`."""

    text: str = field(repr=False)
    images: list[Any] = field(repr=False)
    learnt: list[tuple[int, int]]
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
    """A sample per conversation, with labels on what the assistant says, its end of turn included.

    A message's content is text, or a list of ``{"type": "text", "text": ...}`` and ``{"type": "image", "image": ...}``;
    an image is a path, relative ones from the data file's directory. Images may also stand in a field *images_field* of
    the row, one or a list, paths or an image column of ``datasets``: they fill the entries ``{"type": "image"}`` in
    order, or where there are none, they come first in the first message of the user. *learn* ``last`` takes the
    assistant's last turn only.

    Images are opened when a sample is read. A sample of more than *seq_length* tokens, those of its images included,
    is then refused with its place, or with *truncation* ``right`` cut; one whose image would be cut, or that would keep
    nothing to learn, is left out: it weighs nothing, and the log names it.
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
    """The map-style data set of :func:`conversations`. Indexing raises :class:`RecipeError` with a sample's place."""

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
        self.source, self.template = source, template
        self.messages_field = messages_field
        self.images_field = images_field if source.has_field(images_field) else None
        self.seq_length, self.truncation = seq_length, truncation
        self.num_samples = at_most(max_samples, source.num_rows)
        self.folder = source.folder

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> ImageText:
        row = self.source.row(index)
        where = f"sample {index} of {self.source.path}"
        try:
            return image_text(
                self.template,
                row[self.messages_field],
                _listed(row[self.images_field] if self.images_field else None),
                self.folder,
                where=where,
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
    text, learnt = template.render(turns)
    if not learnt:
        roles = ", ".join(str(turn["role"]) for turn in turns)
        raise UnusableSample(
            "this conversation has no assistant text to train on", roles, "remove it"
        )
    return ImageText(text, [open_image(value, folder) for value in values], learnt, **options)


@dataclass(frozen=True)
class ImageChatTemplate(ChatTemplate):
    """A processor's chat template: :attr:`tokenizer` is the processor."""

    @property
    def placeholders(self) -> set[str]:
        """The texts that the processor replaces by an image."""
        named = (getattr(self.tokenizer, name, None) for name in ("image_token", "boi_token"))
        return {token for token in named if isinstance(token, str) and token}

    def render(self, turns: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and the (start, end) characters of the assistant's text in it."""
        if self.has_markers:
            text, marked = self._marks(turns, None)
            return text, marked[-1:] if self.last_only else marked
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
    """The turns with contents that are lists of text and empty image entries, and the images in their order.

    Raises :class:`UnusableSample` if the number of *images* does not match the empty image entries.
    """
    turns = [{**turn, "content": _parts(turn.get("content"))} for turn in turns]
    entries = [part for turn in turns for part in turn["content"] if part.get("type") == "image"]
    if images and not entries:
        entries = [{"type": "image"} for _ in images]
        first = next((turn for turn in turns if turn["role"] == "user"), turns[0])
        first["content"] = [*entries, *first["content"]]
    inline = [next((part[key] for key in _INLINE if key in part), None) for part in entries]
    num_places = sum(value is None for value in inline)
    if num_places != len(images):
        num_entries = "1 entry" if num_places == 1 else f"{num_places} entries"
        num_images = "1 image" if len(images) == 1 else f"{len(images)} images"
        raise UnusableSample(
            "the number of images does not match the number of image entries",
            f"{num_entries} for {num_images}",
            'provide one image for each entry {"type": "image"}, or remove these entries',
        )
    rest = iter(images)
    values = [next(rest) if value is None else value for value in inline]
    return [{**turn, "content": _without_inline(turn["content"])} for turn in turns], values


def _without_inline(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The *parts* of a content with empty image entries."""
    bare = []
    for part in parts:
        bare.append({"type": "image"} if part.get("type") == "image" else part)
    return bare


def _check_placeholders(turns: list[dict[str, Any]], placeholders: set[str]) -> None:
    texts = [str(part.get("text", "")) for turn in turns for part in turn["content"]]
    found = sorted(token for token in placeholders if any(token in text for text in texts))
    if found:
        raise UnusableSample(
            "a message contains the processor's placeholder for an image",
            found[0],
            'remove it: images come first in their question; or write {"type": "image"} where each belongs',
        )


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return content
    return [{"type": "text", "text": str(content)}] if content else []


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
