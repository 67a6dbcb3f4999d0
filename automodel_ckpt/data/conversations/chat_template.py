"""Tokenize conversations with a chat template, with labels on the assistant's turns.

The template's ``{% generation %}`` markers determine which tokens are the assistant's. Without markers, they are
located by rendering the conversation up to each assistant turn, with and without the turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.collate import Ids, Key
from automodel_ckpt.data.conversations.assistant_text import (
    METHOD,
    answer_span,
    marked_answers,
    reasoning_spans,
)
from automodel_ckpt.data.conversations.chat_renderer import (
    MARK,
    REWRITTEN,
    ChatRenderer,
    Span,
    common_length,
    leaves_out_end,
    notes_of,
    warn_once,
)
from automodel_ckpt.data.conversations.content_parts import CHECKED_ROLES, check_types, parts_of
from automodel_ckpt.data.conversations.messages import (
    Object,
    Turns,
    UnusableSample,
    calls_of,
    is_trained_on,
    parsed,
    with_functions,
)
from automodel_ckpt.data.conversations.template_choice import model_of
from automodel_ckpt.data.samples.tokenized import TokenizedSample


@dataclass(frozen=True)
class ChatTemplate:
    """Turns a conversation into tokens and labels. Raises :class:`UnusableSample`.

    With *last_only*, only the last turn of the assistant has labels; with *mask_reasoning*, reasoning has none. If
    *max_tokens* is set, the oldest exchanges of a longer conversation are removed.
    """

    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    template: str = field(repr=False)
    variables: Object
    last_only: bool
    mask_reasoning: bool = False
    max_tokens: int | None = None

    @property
    def method(self) -> str:
        """A description of how the assistant's tokens are located, for the log."""
        model = model_of(self.template)
        if model is not None:
            return (
                f"the generation markers of the training template for {model}, which replaces the tokenizer's "
                "(dataset.chat_template original keeps that one)"
            )
        if self.renderer.has_markers:
            return "the template's generation markers"
        return METHOD

    @property
    def key(self) -> Key:
        """Everything that the samples depend on besides the tokenizer."""
        key: Key = (self.template, sorted(self.variables.items()), self.last_only)
        # Options are added if they are set, so that the keys of samples that do not need them stay the same.
        if self.mask_reasoning:
            key += ("mask_reasoning",)
        if self.max_tokens is not None:
            key += ("max_tokens", self.max_tokens)
        if self._for_tools is not None:
            key += ("tools", self._for_tools.template)
        return key

    @cached_property
    def _for_tools(self) -> ChatTemplate | None:
        """The same with the template ``tool_use`` of a tokenizer with several, as in transformers; None without one."""
        named: Any = getattr(self.tokenizer, "chat_template", None)
        if not isinstance(named, dict) or self.template != named.get("default"):
            return None
        for_tools = named.get("tool_use")
        return None if for_tools is None else replace(self, template=for_tools)

    # cached_property writes to __dict__: a frozen dataclass allows it, one with slots does not.
    @cached_property
    def renderer(self) -> ChatRenderer:
        """The template with the tokenizer and the variables that it gets."""
        return ChatRenderer(self.tokenizer, self.template, self.variables)

    def text(self, conversation: Turns) -> str:
        """Render a conversation, a list of messages from :func:`turns_of`, as text with its special tokens.

        Raises :class:`UnusableSample` if the template cannot render it.
        """
        turns = self._with_text_contents(conversation)
        text = self.renderer.text(turns)
        for note in notes_of(self.renderer, turns, text):
            warn_once(note)
        return text

    def sample(self, conversation: Turns, tools: Any) -> TokenizedSample:
        """Tokenize a conversation, a list of messages from :func:`turns_of`, with labels on the assistant's tokens.

        Raises :class:`UnusableSample` if the template cannot render it or if no token has a label.
        """
        if self._for_tools is not None and parsed(tools):
            return self._for_tools.sample(conversation, tools)
        turns, offered = self.prepared(conversation, tools)
        turns = self._fitting(turns, offered)
        text, spans, notes = self.located(turns, offered)
        tokens, labelled = self._tokenized(text, spans)
        if self.mask_reasoning:
            for span in reasoning_spans(self.renderer, turns, offered, text):
                first, last = self._token_span(text, span, tokens)
                labelled[first:last] = [False] * (last - first)
        # The first token is never predicted, so its label does not count.
        if not any(labelled[1:]):
            raise UnusableSample(
                "this conversation has no assistant token to train on",
                ", ".join(str(turn["role"]) for turn in turns),
                "remove it, use the role assistant and no weight 0 for the messages to train on, or correct the chat "
                "template's generation markers",
            )
        return TokenizedSample(tokens, labelled, notes=tuple(notes))

    def prepared(self, conversation: Turns, tools: Any) -> tuple[Turns, Any]:
        """Return a conversation, a list of messages from :func:`turns_of`, and its tools as the template takes them.

        Raises :class:`UnusableSample` if the template would omit the tools or a call of one.
        """
        turns = self._with_arguments(self._with_text_contents(conversation))
        offered = self._offered(tools)
        self._check_calls_rendered(turns, offered)
        return turns, offered

    def _fitting(self, turns: Turns, tools: Any) -> Turns:
        """Remove the oldest exchanges until the rest has at most *max_tokens* tokens, or one exchange remains.

        An exchange begins with a message of the user. System messages at the beginning remain.
        """
        if self.max_tokens is None or self._num_tokens(turns, tools) <= self.max_tokens:
            return turns
        system = list(takewhile(lambda turn: turn["role"] in ("system", "developer"), turns))
        remaining = turns
        for number in range(len(system), len(turns)):
            if turns[number]["role"] == "user":
                remaining = system + turns[number:]
                if self._num_tokens(remaining, tools) <= self.max_tokens:
                    break
        return remaining

    def _num_tokens(self, turns: Turns, tools: Any) -> int:
        return len(self.renderer.encode(self.renderer.text(turns, tools)))

    def _with_text_contents(self, turns: Turns) -> Turns:
        """Replace lists of parts by their text, if the template supports only text.

        Raises :class:`UnusableSample` for a part that the template would leave out.
        """
        converted = []
        for turn in turns:
            content = turn.get("content")
            if isinstance(content, list):
                if not self.renderer.takes_parts:
                    content = _text_of(content)
                elif turn["role"] in CHECKED_ROLES:
                    content = parts_of(content)
                    check_types(content, ("text",), self.template)
                turn = turn | {"content": content}
            converted.append(turn)
        return converted

    def _with_arguments(self, turns: Turns) -> Turns:
        """Parse the arguments of calls that are JSON text, if the template requires objects."""
        arguments = [call.get("arguments") for turn in turns for call in calls_of(turn)]
        has_text = any(isinstance(each, str) for each in arguments)
        if not has_text or not self.renderer.needs_objects:
            return turns

        def read(call: Object) -> Object:
            # Other calls stay as they are.
            with suppress(KeyError, TypeError, ValueError):
                return call | {"arguments": json.loads(call["arguments"])}
            return call

        return [with_functions(turn, read) for turn in turns]

    def _offered(self, tools: Any) -> Any:
        """Return the *tools* of a sample, a list or its JSON text, for the template. Returns None when there are none.

        Raises :class:`UnusableSample` if the template does not write tools: the model would be trained to call what it
        was never told of.
        """
        offered = parsed(tools) or None
        if offered is not None and "tools" not in self.template:
            raise UnusableSample(
                "the chat template omits the tools of this conversation",
                offered,
                "set dataset.chat_template to a template that writes tools, or remove them from the data",
            )
        return offered

    def _check_calls_rendered(self, turns: Turns, tools: Any) -> None:
        """Raise :class:`UnusableSample` if the template omits a tool call.

        Otherwise, the model would be trained to answer nothing in place of a call.
        """
        names = {str(call.get("name")) for turn in turns for call in calls_of(turn)}
        if not names:
            return
        # A mark behind each name, because the name alone may occur elsewhere in the text.
        marked = [
            with_functions(turn, lambda call: call | {"name": f"{call.get('name')}{MARK}"})
            for turn in turns
        ]
        text = self.renderer.text(marked, tools)
        omitted = sorted(name for name in names if name + MARK not in text)
        if omitted:
            raise UnusableSample(
                "the chat template omits the tool calls in this conversation",
                ", ".join(omitted),
                "set dataset.chat_template to a template that writes tool calls, or remove such conversations",
            )

    def located(self, turns: Turns, tools: Any) -> tuple[str, list[Span], list[str]]:
        """Render a conversation. Returns the text, the spans of the assistant's text that get labels, and notes."""
        renderer = self.renderer
        if renderer.has_markers:
            # Not transformers' mask of assistant tokens: a character without a token throws it off.
            text, spans = marked_answers(renderer, turns, tools)
            notes = [*notes_of(renderer, turns, text)]
            if spans:
                notes += leaves_out_end(renderer, text[spans[-1][1] :])
            return text, _last_of(spans) if self.last_only else spans, notes
        text, spans = renderer.text(turns, tools), []
        notes = [*notes_of(renderer, turns, text)]
        numbers = [number for number, turn in enumerate(turns) if is_trained_on(turn)]
        for number in numbers[-1:] if self.last_only else numbers:
            span, is_rewritten = answer_span(renderer, turns, tools, number, text)
            spans.append(span)
            notes += [REWRITTEN] if is_rewritten else []
        return text, spans, notes

    def _tokenized(self, text: str, spans: Sequence[Span]) -> tuple[Ids, list[bool]]:
        """Tokenize a rendered text. Returns the tokens, and whether each is in one of *spans*."""
        if not self.renderer.has_markers:
            tokens = self.renderer.encode(text)
            labelled = [False] * len(tokens)
            for span in spans:
                first, last = self._token_span(text, span, tokens)
                labelled[first:last] = [True] * (last - first)
            return tokens, labelled
        try:
            encoded = self.tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
        except NotImplementedError as error:
            raise UnusableSample(
                "the chat template has generation markers, but the tokenizer cannot map tokens to characters",
                type(self.tokenizer).__name__,
                "use a fast tokenizer, or set dataset.chat_template to a template without generation markers",
            ) from error
        return list(encoded["input_ids"]), _within(encoded["offset_mapping"], spans)

    def _token_span(self, text: str, span: Span, tokens: Ids) -> tuple[int, int]:
        """Find the first token of *span* in *text*, and the one after its last.

        They are located in the *tokens* of the whole text: the text before a border, tokenized alone, may end in other
        tokens.
        """
        start, end = span
        first = common_length(self.renderer.encode(text[:start]), tokens)
        if end == len(text):
            return first, len(tokens)
        return first, common_length(self.renderer.encode(text[:end]), tokens)


def _text_of(content: list[Any]) -> str:
    """Join the texts of a list of parts. Raises :class:`UnusableSample` for a part that is not text."""
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise UnusableSample(
                "a message has a part that is not text, but the chat template supports only text",
                part,
                "remove the part; images require a vision-language model and automodel_ckpt.data.vlm.conversations",
            )
        texts.append(text)
    return "".join(texts)


def _within(spans: Sequence[Span], labeled_spans: Sequence[Span]) -> list[bool]:
    """Return for each of *spans* whether it overlaps one of *labeled_spans*. Both are in the order of the text."""
    rest = list(reversed(labeled_spans))
    overlaps = []
    for start, end in spans:
        while rest and rest[-1][1] <= start:
            rest.pop()
        if not rest:
            overlaps.append(False)
            continue
        labeled_start, labeled_end = rest[-1]
        overlaps.append(max(start, labeled_start) < min(end, labeled_end))
    return overlaps


def _last_of(spans: Sequence[Span]) -> list[Span]:
    """The last of *spans* that is not empty, and those before it that it continues."""
    spans = [(start, end) for start, end in spans if start < end]
    first = len(spans) - 1
    while first > 0 and spans[first - 1][1] == spans[first][0]:
        first -= 1
    return spans[max(first, 0) :]
