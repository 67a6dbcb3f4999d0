"""Conversations with images or audio, rendered by the processor's chat template with a placeholder for each of them.

The assistant's text is located in the rendered text. The processor converts the texts, images and audio of a
micro-batch to tensors (:mod:`.image_collate`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from automodel_ckpt.base.units import counted
from automodel_ckpt.data.collate import (
    Item,
    Key,
    at_most,
    require_choice,
    require_index,
)
from automodel_ckpt.data.conversations.chat_renderer import Span, notes_of, warn_once
from automodel_ckpt.data.conversations.chat_template import ChatTemplate
from automodel_ckpt.data.conversations.content_parts import (
    CHECKED_ROLES,
    check_types,
    parts_of,
    with_normal_media,
)
from automodel_ckpt.data.conversations.messages import (
    Object,
    Turns,
    UnusableSample,
    as_rendered,
    at_row,
    turns_of,
)
from automodel_ckpt.data.conversations.template_choice import template_of
from automodel_ckpt.data.media.media_files import (
    AUDIO,
    IMAGE,
    MEDIA,
    Media,
    Samples,
    media_of,
    open_audio,
    open_image,
    pillow,
    placeholders_of,
    sampling_rate_of,
)
from automodel_ckpt.data.rows.source import Source

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImageText:
    """A conversation as text with a placeholder for each of its *images*, which are Pillow images, and *audios*.

    *where* is the location of the sample, for error messages. A sample of more than *seq_length* tokens (None: no
    limit) is rejected (*truncation* ``error``), truncated (``right``) or skipped (``skip``).
    """

    text: str = field(repr=False)
    images: list[Any] = field(repr=False)
    labeled_spans: list[Span]
    """The (start, end) characters of the assistant's text."""
    where: str = "a sample"
    seq_length: int | None = None
    truncation: str = "error"
    audios: list[Samples] = field(default_factory=list, repr=False)
    """Samples of one channel at the sampling rate of the processor."""


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
    """Text to insert before each assistant text, without labels."""
    image_marker: str | None = None
    """Text in a message that marks the place of an image; None: there is none."""
    audio_marker: str | None = None
    """Text in a message that marks the place of an audio; None: there is none."""

    def __post_init__(self) -> None:
        require_choice("learn", self.learn, ("all", "last"))
        require_choice("truncation", self.truncation, ("error", "right", "skip"))

    def template(self, processor: Any) -> ImageChatTemplate:
        """Return the chat template for a processor. Raises :class:`RecipeError` if there is none."""
        text = template_of(processor, self.chat_template)
        is_last = self.learn == "last"
        return ImageChatTemplate(processor, text, dict(self.template_kwargs), is_last, options=self)


@dataclass(frozen=True)
class RowContent:
    """What a row contains: *messages*, *images* and *audios* for the entries that are empty, and *tools*."""

    messages: Any
    images: list[Any]
    tools: Any = None
    audios: list[Any] = field(default_factory=list)


class ImageConversations:
    """A map-style data set of :class:`ImageText`: a conversation of each row of *source*, at most *max_samples*.

    *content_of* converts a row, with at least these *fields*, to its messages and images. It raises
    :class:`UnusableSample`. *key* identifies what it does. *media* are the kinds that samples may have. *numbers* are
    the rows that are used; None: all. Indexing raises :class:`RecipeError` for an unusable row.
    """

    def __init__(
        self,
        processor: Any,
        source: Source,
        fields: Sequence[str],
        content_of: Callable[[Item], RowContent],
        options: ImageOptions,
        *,
        key: Key,
        max_samples: int | None = None,
        media: Media = frozenset([IMAGE]),
        numbers: Sequence[int] | None = None,
    ) -> None:
        if IMAGE in media:
            pillow()
        self.media = media
        self.numbers = numbers
        self.source = source
        self.content_of = content_of
        self.options = options
        self.template = options.template(processor)
        self.key = key
        source.require(fields)
        num_rows = source.num_rows if numbers is None else len(numbers)
        self.num_samples = at_most(max_samples, num_rows)
        self.folder = source.folder
        log.debug("%s: the assistant's tokens are found by %s", source.path, self.template.method)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> ImageText:
        require_index(index, self.num_samples)
        number = index if self.numbers is None else int(self.numbers[index])
        row = self.source.row(number)
        with at_row(self.source, number):
            return image_text(
                self.template,
                self.content_of(row),
                self.folder,
                where=f"sample {index} of {self.source.path}",
                seq_length=self.options.seq_length,
                truncation=self.options.truncation,
            )

    def fingerprint(self) -> Key:
        """Return a key that changes with the rows and with what is made of them; reads the source.

        It does not change if an image file that a row names gets another content.
        """
        template = self.template.key
        source = self.source.fingerprint()
        return (source, self.num_samples, *self.key, repr(self.options), *template)


def image_text(
    template: ImageChatTemplate, content: RowContent, folder: Path = Path(), **options: Any
) -> ImageText:
    """Make a sample of a conversation, and the images and audio for its empty entries.

    Relative paths of files start at *folder*. *options* are further fields of :class:`ImageText`. Raises
    :class:`UnusableSample` if the conversation has no assistant text, its images or audios do not match, or the
    template cannot write it.
    """
    given = [_with_parts(turn) for turn in turns_of(content.messages)]
    given = _with_marks(given, template.options.image_marker, IMAGE)
    given = _with_marks(given, template.options.audio_marker, AUDIO)
    turns, images = _assigned(given, content.images, IMAGE)
    turns, audios = _assigned(turns, content.audios, AUDIO)
    known = ("text", *(kind for kind in MEDIA if kind in media_of(template.tokenizer)))
    for turn in turns:
        if turn["role"] in CHECKED_ROLES:
            check_types(turn["content"], known, template.template)
    _check_placeholders(turns, template.placeholders)
    text, labeled_spans = template.render(turns, content.tools)
    for note in notes_of(template.renderer, turns, text):
        warn_once(note)
    if not labeled_spans:
        roles = ", ".join(str(turn["role"]) for turn in turns)
        raise UnusableSample("this conversation has no assistant text to train on", roles)
    opened = [open_image(value, folder) for value in images]
    rate = sampling_rate_of(template.tokenizer) if audios else 0
    heard = [open_audio(value, folder, rate) for value in audios]
    return ImageText(text, opened, labeled_spans, audios=heard, **options)


@dataclass(frozen=True)
class ImageChatTemplate(ChatTemplate):
    """A processor's chat template: :attr:`tokenizer` is the processor."""

    options: ImageOptions = field(default_factory=ImageOptions)

    @property
    def placeholders(self) -> set[str]:
        """The texts that the processor replaces by an image or an audio."""
        found = set(placeholders_of(self.tokenizer).values())
        token = getattr(self.tokenizer, "boi_token", None)
        if isinstance(token, str) and token:
            found.add(token)
        return found

    def render(self, turns: Turns, tools: Any) -> tuple[str, list[Span]]:
        """Render a conversation and the *tools* that are offered in it, a list or its JSON text.

        Returns the text and the (start, end) characters of the assistant's text in it.
        """
        turns, offered = self.prepared(turns, tools)
        text, labeled_spans, _ = self.located(turns, offered)
        if not self.options.answer_prefix:
            return text, labeled_spans
        unweighted = [as_rendered(turn) for turn in turns]
        _, spans, _ = replace(self, last_only=False).located(unweighted, offered)
        return _with_prefix(self.options.answer_prefix, text, spans, labeled_spans)

    def _with_text_contents(self, turns: Turns) -> Turns:
        return turns if self.takes_parts else [self._as_text(turn) for turn in turns]

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template writes the entries of a content that is a list, rather than the list as it is."""
        kind = IMAGE if IMAGE in media_of(self.tokenizer) else AUDIO
        entries = [{"type": kind}, {"type": "text", "text": "probe"}]
        try:
            text = self.renderer.text([{"role": "user", "content": entries}])
        except UnusableSample:
            return not self.renderer.can_render([{"role": "user", "content": "probe"}])
        return re.search(r"['\"]type['\"]", text) is None

    def _as_text(self, turn: Object) -> Object:
        """Copy a message with its content as text, for a template that supports only text."""
        placeholders = placeholders_of(self.tokenizer)
        texts = []
        for part in turn["content"]:
            kind = part.get("type")
            if kind not in MEDIA:
                texts.append(str(part.get("text", "")))
                continue
            if kind not in placeholders:
                raise UnusableSample(
                    f"the chat template supports only text, and the processor has no {kind}_token for {kind} parts",
                    type(self.tokenizer).__name__,
                    f"set dataset.chat_template to a template that writes {kind} entries",
                )
            texts.append(placeholders[kind])
        return turn | {"content": "".join(texts)}


def _with_prefix(
    prefix: str, text: str, spans: Sequence[Span], labeled_spans: Sequence[Span]
) -> tuple[str, list[Span]]:
    """Insert *prefix* into *text* at the start of each of *spans*; returns the text and the moved *labeled_spans*."""
    ends = dict(labeled_spans)
    pieces, moved = [], []
    previous = 0
    for number, (start, _) in enumerate(spans, 1):
        pieces += [text[previous:start], prefix]
        previous = start
        if start in ends:
            shift = number * len(prefix)
            moved.append((start + shift, ends[start] + shift))
    pieces.append(text[previous:])
    return "".join(pieces), moved


def _with_marks(turns: Turns, marker: str | None, kind: str) -> Turns:
    """Replace each *marker* in the users' text by an empty entry of a *kind*; LLaVA's data mark images this way."""
    marked = []
    for turn in turns:
        parts = []
        for part in turn["content"]:
            text = str(part.get("text", ""))
            if not marker or turn["role"] != "user" or marker not in text:
                parts.append(part)
                continue
            for number, piece in enumerate(text.split(marker)):
                parts += [{"type": kind}] if number else []
                parts += [{"type": "text", "text": piece.strip()}] if piece.strip() else []
        marked.append({**turn, "content": parts})
    return marked


def _assigned(turns: Turns, given: list[Any], kind: str) -> tuple[Turns, list[Any]]:
    """Assign values to the entries of a *kind*. Returns turns with empty entries, and the values in their order.

    Raises :class:`UnusableSample` if the number of *given* values does not match the empty entries.
    """
    turns = [dict(turn) for turn in turns]
    parts = chain.from_iterable(turn["content"] for turn in turns)
    inline = [part.get(kind) for part in parts if part.get("type") == kind]
    if given and not inline:
        inline = [None] * len(given)
        first = next((turn for turn in turns if turn["role"] == "user"), turns[0])
        first["content"] = [*({"type": kind} for _ in given), *first["content"]]
    num_empty = sum(value is None for value in inline)
    if num_empty != len(given):
        raise UnusableSample(
            f"the number of {kind}s does not match the number of {kind} entries",
            f"{counted(num_empty, 'entry', 'entries')} for {counted(len(given), kind)}",
            f'provide one {kind} for each entry {{"type": "{kind}"}}, or remove these entries',
        )
    for turn in turns:
        turn["content"] = [
            {"type": kind} if part.get("type") == kind else part for part in turn["content"]
        ]
    rest = iter(given)
    return turns, [next(rest) if value is None else value for value in inline]


def _check_placeholders(turns: Turns, placeholders: set[str]) -> None:
    """Raise :class:`UnusableSample` if a text contains a placeholder, which the processor would replace."""
    for placeholder in sorted(placeholders):
        for turn in turns:
            for part in turn["content"]:
                if placeholder not in str(part.get("text", "")):
                    continue
                raise UnusableSample(
                    "a message contains the processor's placeholder for an image or an audio",
                    placeholder,
                    "remove it: images and audio come first in their question; or write an entry such as "
                    '{"type": "image"} where each belongs',
                )


def _with_parts(turn: Object) -> Object:
    """Copy a message with its content as a list of parts."""
    content = turn.get("content")
    is_checked = turn["role"] in CHECKED_ROLES
    if not is_checked and isinstance(content, list) and all(isinstance(e, dict) for e in content):
        # The results of tools have the types that the template expects.
        return {**turn, "content": with_normal_media(content)}
    return {**turn, "content": parts_of(content)}
