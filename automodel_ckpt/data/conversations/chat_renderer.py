"""Render conversations with a chat template, and find out how the template writes them, and what it loses."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, takewhile
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from automodel_ckpt.base.bounded_templates import bound_chat_templates
from automodel_ckpt.data.collate import Ids
from automodel_ckpt.data.conversations.messages import (
    KEYS,
    REASONING,
    ROLES,
    Object,
    Turns,
    UnusableSample,
    as_rendered,
)
from automodel_ckpt.data.samples.encoder import encode_one
from automodel_ckpt.errors import RecipeError, printable

log = logging.getLogger(__name__)

Span = tuple[int, int]
"""The first character of a part of a text, and the one after the last."""
MARK = "__shown__"
"""A text that no conversation contains. Its presence in the output shows that the template wrote it."""
_WATCHED = "{% macro strftime_now(form) %}" + MARK + "{% endmacro %}"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_LIKE_TOKEN = re.compile(r"<[^<>\s]{1,60}>|\[[A-Za-z_/]{2,40}\]")
_QUESTION = [{"role": "user", "content": "probe"}]


REWRITTEN = (
    "assistant turns that the chat template writes in another way in a prompt, or when more messages follow; the "
    "labels are on what it writes for the whole conversation"
)
_LOST = "text or reasoning that the chat template does not write"
_CONTROL = (
    "special tokens in the text of messages, which become control tokens: remove them from the data, or divide them by "
    "a space"
)
_NO_END = (
    "no label on the end of the assistant's turn, because the template's generation markers leave it out: the model "
    "does not learn to stop"
)
_THINK = re.compile(r"</?think>")


@dataclass(frozen=True)
class ChatRenderer:
    """Renders conversations with a chat template. A conversation is a list of messages from :func:`turns_of`.

    *tokenizer* may be a processor. *variables* are from ``dataset.template_kwargs``. Methods raise
    :class:`UnusableSample` if the template cannot render a conversation.
    """

    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    template: str = field(repr=False)
    variables: Object

    def text(self, turns: Turns, tools: Any = None, **options: Any) -> str:
        """Render a conversation as text with its special tokens. *options* are arguments of ``apply_chat_template``."""
        apply: Any = self.tokenizer.apply_chat_template
        rendered = [as_rendered(turn) for turn in turns]
        with _reporting_errors():
            text = apply(
                rendered,
                tools=tools,
                chat_template=self.template,
                tokenize=False,
                **options,
                **self.variables,
            )
        return str(text)

    def can_render(self, turns: Turns) -> bool:
        """Whether the template renders a conversation without an error."""
        try:
            self.text(turns)
        except UnusableSample:
            return False
        return True

    def text_with_marks(self, turns: Turns, tools: Any) -> tuple[str, list[Span]]:
        """Render a conversation. Returns the text and all spans inside the template's generation markers."""
        render: Any = render_jinja_template
        rendered = [as_rendered(turn) for turn in turns]
        variables = {**self.special_tokens, **self.variables}
        with _reporting_errors():
            texts, marks = render(
                conversations=[rendered],
                tools=tools,
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **variables,
            )
        return texts[0], [(start, end) for start, end in marks[0]]

    def encode(self, text: str) -> Ids:
        """Tokenize a rendered text."""
        # The template has written the special tokens: the tokenizer must not add them again.
        return encode_one(self.tokenizer, text)

    @cached_property
    def control_tokens(self) -> frozenset[str]:
        """The special tokens of the tokenizer."""
        added = self.inner.added_tokens_decoder.values()
        return frozenset(token.content for token in added if token.special)

    @cached_property
    def token_pattern(self) -> re.Pattern[str]:
        """A pattern that finds special tokens, and other text like them, faster than all special tokens would."""
        others = [token for token in self.control_tokens if not _LIKE_TOKEN.fullmatch(token)]
        longest_first = sorted(filter(str.strip, others), key=len, reverse=True)
        return re.compile("|".join([*map(re.escape, longest_first), _LIKE_TOKEN.pattern]))

    @property
    def special_tokens(self) -> Object:
        """The special tokens by name, which templates read as variables."""
        return dict(self.inner.special_tokens_map)

    @property
    def inner(self) -> Any:
        """The tokenizer, which may be in a processor."""
        return getattr(self.tokenizer, "tokenizer", self.tokenizer)

    @property
    def has_markers(self) -> bool:
        """Whether the template itself marks the assistant's text."""
        return _GENERATION.search(self.template) is not None

    @property
    def writes_the_date(self) -> bool:
        """Whether the template writes the current time, so that samples depend on it."""
        if "strftime_now" not in self.template:
            return False
        # A macro takes precedence over the function of this name that transformers provides.
        watched = replace(self, template=_WATCHED + self.template)
        with suppress(UnusableSample):
            return MARK in watched.text(_QUESTION)
        return False

    # cached_property writes to __dict__: a frozen dataclass allows it, one with slots does not.
    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template writes the text of a content that is a list of parts, rather than the list itself."""
        parts = [{"role": "user", "content": [{"type": "text", "text": "probe"}]}]
        try:
            text = self.text(parts)
        except UnusableSample:
            return False
        writes_list = re.search(r"['\"]type['\"]", text) is not None
        return "probe" in text and not writes_list

    @cached_property
    def needs_objects(self) -> bool:
        """Whether the arguments of calls have to be objects: the template fails for JSON text, or puts it in quotes."""
        try:
            text = self.text(_calling('{"probe": 1}'))
        except UnusableSample:
            return self.can_render(_calling({"probe": 1}))
        return '{\\"probe' in text

    @cached_property
    def header(self) -> str:
        """The header that the template writes before the assistant's text: its generation prompt."""
        with suppress(UnusableSample):
            asked = self.text(_QUESTION)
            prompted = self.text(_QUESTION, add_generation_prompt=True)
            if prompted.startswith(asked):
                return prompted.removeprefix(asked)
        return ""

    @cached_property
    def end_of_turn(self) -> str:
        """The text that the template writes after the assistant's text."""
        answer = "answer of the probe"
        with suppress(UnusableSample):
            text = self.text([*_QUESTION, {"role": "assistant", "content": answer}])
            _, _, end = text.partition(answer)
            return end
        return ""


@contextmanager
def _reporting_errors() -> Iterator[None]:
    """Raise the template's errors as :class:`UnusableSample`, including exceeded limits of time and size.

    A template that cannot be parsed raises :class:`RecipeError`: no sample is the cause.
    """
    bound_chat_templates()
    try:
        yield
    except TemplateSyntaxError as error:
        raise RecipeError(
            "the chat template is not valid Jinja",
            where="dataset.chat_template",
            value=f"line {error.lineno}: {error.message}",
            hint="correct the template; without the key, the tokenizer's template is used",
        ) from error
    except Exception as error:  # a template can raise anything, for example divide by zero
        value = f"{type(error).__name__}: {error}"
        hint = "correct the conversation, the template, or dataset.template_kwargs"
        raise UnusableSample(
            "the chat template cannot render this conversation", value, hint
        ) from error


def _calling(arguments: str | Object) -> Turns:
    """Make a conversation with a tool call, to test how a template writes it."""
    call = {
        "id": "probe0000",
        "type": "function",
        "function": {"name": "probe", "arguments": arguments},
    }
    return [*_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]


def common_length(prefix: Sequence[object], whole: Sequence[object]) -> int:
    """Return the length of the common prefix of both sequences.

    For tokens it may be shorter than *prefix*, because the last token of *prefix* may merge with the text after it.
    """
    if len(prefix) <= len(whole) and whole[: len(prefix)] == prefix:
        return len(prefix)
    pairs = zip(prefix, whole, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def notes_of(renderer: ChatRenderer, turns: Turns, whole: str) -> Iterator[str]:
    """Yield what is notable about *turns*, which the template writes as the text *whole*."""
    for turn in turns:
        if turn["role"] not in ROLES and repr(turn["role"])[1:-1] not in renderer.template:
            yield (
                f"messages with the role {turn['role']!r}, which the chat template does not name; only the role "
                "'assistant' is trained on"
            )
        for key in turn:
            if key not in KEYS and str(key) not in renderer.template:
                yield f"messages with the key {key!r}, which is not read"
    if any(_lost(turns, whole)):
        yield _LOST
    if any(_has_control_token(renderer, turn) for turn in turns):
        yield _CONTROL


@functools.cache
def warn_once(note: str) -> None:
    """Log a warning about a conversation that is not counted, because it is prepared during training."""
    log.warning("a conversation has %s", printable(note))


def leaves_out_end(renderer: ChatRenderer, rest: str) -> Iterator[str]:
    """Yield a note if *rest*, the text after the last label, begins with the end of the assistant's turn."""
    end = renderer.end_of_turn.strip()
    if end and rest.lstrip().startswith(end):
        yield _NO_END


def _lost(turns: Turns, whole: str) -> Iterator[bool]:
    position = 0
    for text in chain.from_iterable(map(_texts, turns)):
        for piece in map(str.strip, _THINK.split(text)):
            found = whole.find(piece, position)
            if found >= 0:
                position = found + len(piece)
                continue
            # Templates may write the results of tools as JSON.
            as_json = json.dumps(piece, ensure_ascii=False)
            yield not (piece in whole or as_json[1:-1] in whole)


def _has_control_token(renderer: ChatRenderer, turn: Object) -> bool:
    """Whether the text of a message has a special token.

    An assistant's text may have those that its model writes, such as thinking or calls, but not its end.
    """
    if turn["role"] == "assistant":
        end = str(renderer.special_tokens.get("eos_token") or "")
        return end != "" and any(end in text for text in _texts(turn))
    found = chain.from_iterable(map(renderer.token_pattern.findall, _texts(turn)))
    return not renderer.control_tokens.isdisjoint(found)


def _texts(turn: Object) -> Iterator[str]:
    """Yield the content of a message, the texts of its parts, and its reasoning."""
    for key in ("content", *REASONING):
        value = turn.get(key)
        for part in value if isinstance(value, list) else [value]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text
