"""Conversations with images, rendered by the processor's chat template with a placeholder for each image.

The assistant's text is located in the rendered text. The processor converts the texts and images of a micro-batch to
tensors (:mod:`.image_collate`).
"""

from __future__ import annotations

import bisect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from automodel_ckpt.data.answer_prefixes import answer_prefixes
from automodel_ckpt.data.arguments import at_most, require_choice
from automodel_ckpt.data.chat_renderer import ChatRenderer
from automodel_ckpt.data.chat_template import ChatTemplate
from automodel_ckpt.data.content_parts import (
    CHECKED_ROLES,
    check_types,
    parts_of,
    with_normal_images,
)
from automodel_ckpt.data.images import open_image, pillow
from automodel_ckpt.data.marked_answers import marked_answers
from automodel_ckpt.data.messages import UnusableSample, as_rendered, turns_of
from automodel_ckpt.data.source import Source
from automodel_ckpt.data.template_choice import CHOICES, read_template
from automodel_ckpt.data.training_templates import select_template
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImageText:
    """A conversation as text with a placeholder for each of its *images*, which are Pillow images.

    *where* is the location of the sample, for error messages. A sample of more than *seq_length* tokens (None: no
    limit) is rejected (*truncation* ``error``), truncated (``right``) or skipped (``skip``).
    """

    text: str = field(repr=False)
    images: list[Any] = field(repr=False)
    labeled_spans: list[tuple[int, int]]
    """The (start, end) characters of the assistant's text."""
    where: str = "a sample"
    seq_length: int | None = None
    truncation: str = "error"


@dataclass(frozen=True)
class ImageOptions:
    """How rows become samples: the arguments that all builders of conversations with images have.

    Raises :class:`RecipeError` for an unknown choice.
    """

    seq_length: int | None = 2048
    truncation: str = "error"
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    learn: str = "all"
    answer_prefix: str = ""
    image_marker: str | None = None
    """Text in a message that marks the place of an image; None: there is none."""

    def __post_init__(self) -> None:
        require_choice("learn", self.learn, ("all", "last"))
        require_choice("truncation", self.truncation, ("error", "right", "skip"))

    def template(self, processor: Any) -> ImageChatTemplate:
        """Return the chat template for a processor. Raises :class:`RecipeError` if there is none."""
        return ImageChatTemplate(
            processor,
            _template(processor, self.chat_template),
            dict(self.template_kwargs),
            self.learn == "last",
            answer_prefix=self.answer_prefix,
            image_marker=self.image_marker,
        )

    @property
    def key(self) -> tuple[object, ...]:
        """The options that the number of tokens of a sample depends on, besides the template."""
        return self.seq_length, self.truncation


@dataclass(frozen=True)
class RowContent:
    """What a row contains: *messages*, *images* for the image entries that are empty, and *tools* that are offered."""

    messages: Any
    images: list[Any]
    tools: Any = None


class ImageConversations:
    """A map-style data set of :class:`ImageText`: a conversation of each row of *source*, at most *max_samples*.

    *content_of* converts a row, whose fields include *fields*, to its messages and images; it raises
    :class:`UnusableSample`. *key* identifies what it does. Indexing raises :class:`RecipeError` for an unusable row.
    """

    def __init__(
        self,
        processor: Any,
        source: Source,
        fields: Sequence[str],
        content_of: Callable[[Mapping[str, Any]], RowContent],
        options: ImageOptions,
        *,
        key: tuple[object, ...],
        max_samples: int | None = None,
    ) -> None:
        pillow()
        self.source = source
        self.content_of = content_of
        self.options = options
        self.template = options.template(processor)
        self.key = key
        source.require(fields)
        self.num_samples = at_most(max_samples, source.num_rows)
        self.folder = source.folder
        log.info("%s: the assistant's tokens are found by %s", source.path, self.template.method)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> ImageText:
        # IndexError also ends an iteration over this class, which has no __iter__.
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        row = self.source.row(index)
        try:
            content = self.content_of(row)
            return image_text(
                self.template,
                content.messages,
                content.images,
                self.folder,
                content.tools,
                where=f"sample {index} of {self.source.path}",
                seq_length=self.options.seq_length,
                truncation=self.options.truncation,
            )
        except UnusableSample as error:
            where = f"sample {index} ({self.source.place(index)})"
            raise RecipeError(
                error.what, where=where, value=error.value, hint=error.hint
            ) from error

    def fingerprint(self) -> tuple[object, ...]:
        """Return a key that changes with the rows and with what is made of them; reads the source.

        It does not change if an image file that a row names gets another content.
        """
        return (
            self.source.fingerprint(),
            self.num_samples,
            *self.key,
            *self.options.key,
            *self.template.key,
        )


def image_text(
    template: ImageChatTemplate,
    conversation: Any,
    images: Sequence[Any],
    folder: Path = Path(),
    tools: Any = None,
    **options: Any,
) -> ImageText:
    """Make a sample of a *conversation* and the *images* for its empty image entries.

    Relative paths of images start at *folder*. *tools*, a list or its JSON text, are passed to the template. *options*
    are further fields of :class:`ImageText`. Raises :class:`UnusableSample` if the conversation has no assistant text,
    its images do not match, or the template cannot write it.
    """
    given = [_with_parts(turn) for turn in turns_of(conversation)]
    given = _with_marked_images(given, template.image_marker)
    turns, values = _assign_images(given, list(images))
    for turn in turns:
        if turn["role"] in CHECKED_ROLES:
            check_types(turn["content"], ("text", "image"), template.template)
    _check_placeholders(turns, template.placeholders)
    text, labeled_spans = template.render(turns, tools)
    if not labeled_spans:
        roles = ", ".join(str(turn["role"]) for turn in turns)
        raise UnusableSample(
            "this conversation has no assistant text to train on", roles, "remove it"
        )
    opened = [open_image(value, folder) for value in values]
    return ImageText(text, opened, labeled_spans, **options)


@dataclass(frozen=True)
class ProcessorRenderer(ChatRenderer):
    """Renders conversations with a processor's chat template: :attr:`tokenizer` is the processor."""

    @property
    def special_tokens(self) -> dict[str, Any]:
        """The special tokens by name, which templates read as variables."""
        processor: Any = self.tokenizer
        return dict(processor.tokenizer.special_tokens_map)


@dataclass(frozen=True)
class ImageChatTemplate(ChatTemplate):
    """A processor's chat template: :attr:`tokenizer` is the processor."""

    answer_prefix: str = ""
    """Text to insert before each assistant text, without labels."""
    image_marker: str | None = None
    """Text in a message that marks the place of an image; None: there is none."""

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that the samples depend on besides the processor."""
        return *super().key, self.answer_prefix, self.image_marker

    @cached_property
    def renderer(self) -> ChatRenderer:
        """The template with the processor and the variables that it gets."""
        return ProcessorRenderer(self.tokenizer, self.template, self.variables)

    @property
    def placeholders(self) -> set[str]:
        """The texts that the processor replaces by an image."""
        found = set()
        for name in ("image_token", "boi_token"):
            token = getattr(self.tokenizer, name, None)
            if isinstance(token, str) and token:
                found.add(token)
        return found

    def render(
        self, turns: list[dict[str, Any]], tools: Any = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation and the *tools* that are offered in it, a list or its JSON text.

        Returns the text and the (start, end) characters of the assistant's text in it.
        """
        turns = self._with_arguments(turns)
        offered = self._offered(tools)
        self._check_calls_rendered(turns, offered)
        if not self.takes_images:
            turns = [self._as_text(turn) for turn in turns]
        text, labeled_spans = self._located(turns, offered)
        if not self.answer_prefix:
            return text, labeled_spans
        unweighted = [as_rendered(turn) for turn in turns]
        _, spans = replace(self, last_only=False)._located(unweighted, offered)
        return _with_prefix(self.answer_prefix, text, spans, labeled_spans)

    @cached_property
    def takes_images(self) -> bool:
        """Whether the template writes the entries of a content that is a list, rather than the list as it is."""
        entries = [{"type": "image"}, {"type": "text", "text": "probe"}]
        try:
            text = self.renderer.text([{"role": "user", "content": entries}])
        except UnusableSample:
            return not self.renderer.can_render([{"role": "user", "content": "probe"}])
        return re.search(r"['\"]type['\"]", text) is None

    def _located(
        self, turns: list[dict[str, Any]], tools: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation and locate the assistant's text that gets labels."""
        if self.renderer.has_markers:
            text, spans = marked_answers(self.renderer, turns, tools)
            if self.last_only:
                spans = spans[-1:]
            return text, spans
        whole = self.renderer.text(turns, tools)
        spans = []
        for number in self.labeled_turns(turns):
            before, after = answer_prefixes(self.renderer, turns, tools, number, whole)
            spans.append((len(before), len(after)))
        return whole, spans

    def _as_text(self, turn: dict[str, Any]) -> dict[str, Any]:
        """Copy a message with its content as text, for a template that supports only text."""
        placeholder = getattr(self.tokenizer, "image_token", None)
        texts = []
        for part in turn["content"]:
            if part.get("type") != "image":
                texts.append(str(part.get("text", "")))
                continue
            if not isinstance(placeholder, str):
                raise UnusableSample(
                    "the chat template supports only text, and the processor has no image_token for images",
                    type(self.tokenizer).__name__,
                    "set dataset.chat_template to a template that writes image entries",
                )
            texts.append(placeholder)
        return turn | {"content": "".join(texts)}


def _with_prefix(
    prefix: str,
    text: str,
    spans: Sequence[tuple[int, int]],
    labeled_spans: Sequence[tuple[int, int]],
) -> tuple[str, list[tuple[int, int]]]:
    """Insert *prefix* into *text* at the start of each of *spans*; returns the text and the moved *labeled_spans*."""
    starts = sorted(start for start, _ in spans)
    pieces = []
    previous = 0
    for start in starts:
        pieces += [text[previous:start], prefix]
        previous = start
    pieces.append(text[previous:])
    moved = []
    for start, end in labeled_spans:
        # A prefix at the start of a span lies before it; one at its end belongs to the next span.
        before_start = bisect.bisect_right(starts, start)
        before_end = bisect.bisect_left(starts, end)
        moved.append((start + before_start * len(prefix), end + before_end * len(prefix)))
    return "".join(pieces), moved


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


def _with_marked_images(turns: list[dict[str, Any]], marker: str | None) -> list[dict[str, Any]]:
    """Replace each *marker* in the users' text by an empty image entry; LLaVA's data mark images this way."""
    if not marker:
        return turns
    return [_split_at(turn, marker) for turn in turns]


def _split_at(turn: dict[str, Any], marker: str) -> dict[str, Any]:
    parts = []
    for part in turn["content"]:
        text = str(part.get("text", ""))
        if turn["role"] != "user" or marker not in text:
            parts.append(part)
            continue
        for number, piece in enumerate(text.split(marker)):
            if number:
                parts.append({"type": "image"})
            if piece.strip():
                parts.append({"type": "text", "text": piece.strip()})
    return {**turn, "content": parts}


def _assign_images(
    turns: list[dict[str, Any]], images: list[Any]
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Assign images to the image entries. Returns turns with empty image entries, and the images in their order.

    Raises :class:`UnusableSample` if the number of *images* does not match the empty image entries.
    """
    turns = [dict(turn) for turn in turns]
    entries = []
    for turn in turns:
        entries += [part for part in turn["content"] if part.get("type") == "image"]
    if images and not entries:
        entries = [{"type": "image"} for _ in images]
        of_user = [turn for turn in turns if turn["role"] == "user"]
        first = of_user[0] if of_user else turns[0]
        first["content"] = [*entries, *first["content"]]
    inline = [entry.get("image") for entry in entries]
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


def _with_parts(turn: dict[str, Any]) -> dict[str, Any]:
    """Copy a message with its content as a list of parts."""
    content = turn.get("content")
    is_checked = turn["role"] in CHECKED_ROLES
    if not is_checked and isinstance(content, list) and all(isinstance(e, dict) for e in content):
        # The results of tools have the types that the template expects.
        return {**turn, "content": with_normal_images(content)}
    return {**turn, "content": parts_of(content)}
