"""Tokenize conversations with a chat template, with labels on the assistant's turns.

The template's ``{% generation %}`` markers determine which tokens are the assistant's. Without markers, they are
located by rendering the conversation up to each assistant turn, with and without the turn.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from automodel_ckpt.data.arguments import require_choice, require_tokenizer
from automodel_ckpt.data.conversation_changes import ConversationChanges
from automodel_ckpt.data.fast_encoding import encode_one
from automodel_ckpt.data.messages import (
    REASONING,
    UnusableSample,
    as_rendered,
    calls_of,
    is_empty,
    is_trained_on,
    parsed,
    with_functions,
)
from automodel_ckpt.data.row_stream import DEFAULT_BLOCK, RowStream
from automodel_ckpt.data.rows import Rows
from automodel_ckpt.data.samples import samples_of
from automodel_ckpt.data.source import Source
from automodel_ckpt.data.templates import bound_chat_templates
from automodel_ckpt.data.tokenized import TokenizedDataset, TokenizedSample
from automodel_ckpt.data.training_templates import model_of, select_template
from automodel_ckpt.data.truncation import Truncation
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)

_Span = tuple[int, int]
"""The first character of a part of a text, and the one after the last."""
_MARK = "__shown__"
"""A text that no conversation contains. Its presence in the output shows that the template wrote it."""
_WATCHED = "{% macro strftime_now(form) %}" + _MARK + "{% endmacro %}"
CHOICES = (None, "original", "training")
"""Values of ``chat_template`` that mean the tokenizer's own, or the shipped template that replaces it."""
_DEFAULT_FIELD = "messages"
_OTHER_FIELD = "conversations"
"""The field of conversations in ShareGPT's data."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def messages(
    tokenizer: PreTrainedTokenizerBase,
    path: str | list[str],
    seq_length: int | None = 2048,
    messages_field: str = "messages",
    tools_field: str = "tools",
    chat_template: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
    learn: Literal["all", "last"] = "all",
    mask_reasoning: bool = False,
    drop_earlier_reasoning: bool = False,
    end_with_answer: bool = False,
    skip_unanswered: bool = False,
    truncation: Literal["error", "right", "skip", "history"] = "error",
    max_samples: int | None = None,
    name: str | None = None,
    split: str = "train",
    revision: str | None = None,
    streaming: bool = False,
    shuffle_block: int = DEFAULT_BLOCK,
) -> TokenizedDataset | RowStream:
    """Make one sample per conversation, with labels on the assistant's text and the end of its turns.

    A conversation is a list of ``{"role", "content", ...}``, or of ShareGPT's ``{"from", "value"}``, also as JSON text.
    The field ``conversations`` is read if there is no field ``messages``. An answer with ``"weight": 0`` has no labels.
    Templates that support only text get the text of contents that are lists of text parts; those that require objects
    get the arguments of ``tool_calls`` as objects. Messages with the roles ``tool_call`` and ``tool_response`` are
    converted (:func:`~automodel_ckpt.data.tool_turns.with_tool_calls`).

    Raises :class:`RecipeError` with the location of a sample that is not a conversation, that the template cannot
    render, whose answers cannot be located in the template's output, or that has no label.
    """
    require_choice("learn", learn, ("all", "last"))
    source = Source.of(path, name, split, revision)
    template = ChatTemplate(
        tokenizer,
        template_of(tokenizer, chat_template),
        dict(template_kwargs or {}),
        learn == "last",
        mask_reasoning,
        max_tokens=seq_length if truncation == "history" else None,
    )
    changes = ConversationChanges(drop_earlier_reasoning, end_with_answer, skip_unanswered)
    encoder = ConversationEncoder(template, changes, messages_field, tools_field)
    _log_template(source, template)
    return samples_of(
        source,
        tokenizer,
        encoder.encode,
        Truncation.of(truncation, seq_length),
        fields=encoder.names,
        key=encoder.key,
        template=template.method,
        max_samples=max_samples,
        streaming=streaming,
        shuffle_block=shuffle_block,
    )


def _log_template(source: Source, template: ChatTemplate) -> None:
    """Log how the assistant's tokens are located, and warn of a template that writes the date."""
    log.info("%s: the assistant's tokens are found by %s", source.path, template.method)
    if template.writes_the_date:
        log.warning(
            "%s: the chat template writes today's date into every sample; for reproducible samples set a fixed date, "
            "for example dataset.template_kwargs.date_string '26 Jul 2024'",
            source.path,
        )


@dataclass(frozen=True)
class ChatTemplate:
    """Turns a conversation into tokens and labels. Raises :class:`UnusableSample`.

    With *last_only*, only the last turn of the assistant has labels; with *mask_reasoning*, reasoning has none. If
    *max_tokens* is set, the oldest exchanges of a longer conversation are removed.
    """

    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    template: str = field(repr=False)
    variables: dict[str, Any]
    last_only: bool
    mask_reasoning: bool = False
    max_tokens: int | None = None

    @property
    def has_markers(self) -> bool:
        """Whether the template itself marks the assistant's text."""
        return _GENERATION.search(self.template) is not None

    @property
    def method(self) -> str:
        """A description of how the assistant's tokens are located, for the log."""
        model = model_of(self.template)
        if model is not None:
            return (
                f"the generation markers of the training template for {model}, which replaces the tokenizer's "
                "(dataset.chat_template original keeps that one)"
            )
        if self.has_markers:
            return "the template's generation markers"
        return "rendering the conversation up to each assistant turn"

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that the samples depend on besides the tokenizer."""
        key: tuple[object, ...] = (self.template, sorted(self.variables.items()), self.last_only)
        # Options are added if they are set, so that the keys of samples that do not need them stay the same.
        if self.mask_reasoning:
            key += ("mask_reasoning",)
        if self.max_tokens is not None:
            key += ("max_tokens", self.max_tokens)
        return key

    def text(self, conversation: list[dict[str, Any]]) -> str:
        """Render a conversation, a list of messages from :func:`turns_of`, as text with its special tokens.

        Raises :class:`UnusableSample` if the template cannot render it.
        """
        turns = self._with_text_contents(conversation)
        return str(self._apply(turns, None, tokenize=False))

    def sample(self, conversation: list[dict[str, Any]], tools: Any) -> TokenizedSample:
        """Tokenize a conversation, a list of messages from :func:`turns_of`, with labels on the assistant's tokens.

        Raises :class:`UnusableSample` if the template cannot render it or if no token has a label.
        """
        turns = self._with_text_contents(conversation)
        turns = self._with_arguments(turns)
        offered = parsed(tools) or None
        self._check_calls_rendered(turns, offered)
        turns = self._fitting(turns, offered)
        locate = self._by_markers if self.has_markers else self._by_prefixes
        sample = locate(turns, offered)
        labelled = sample.labelled
        if self.last_only:
            labelled = _last_run(labelled)
        if self.mask_reasoning:
            labelled = self._without_reasoning(turns, offered, sample.tokens, labelled)
        # The first token is never predicted, so its label does not count.
        if not any(labelled[1:]):
            raise _no_labels(turns)
        return TokenizedSample(sample.tokens, labelled)

    def _fitting(self, turns: list[dict[str, Any]], tools: Any) -> list[dict[str, Any]]:
        """Remove the oldest exchanges until the rest has at most *max_tokens* tokens, or one exchange remains.

        An exchange begins with a message of the user. System messages at the beginning remain.
        """
        if self.max_tokens is None or self._num_tokens(turns, tools) <= self.max_tokens:
            return turns
        is_system = [turn["role"] in ("system", "developer") for turn in turns]
        num_system = (*is_system, False).index(False)
        starts = [
            number
            for number, turn in enumerate(turns)
            if number >= num_system and turn["role"] == "user"
        ]
        remaining = turns
        for start in starts:
            remaining = turns[:num_system] + turns[start:]
            if self._num_tokens(remaining, tools) <= self.max_tokens:
                break
        return remaining

    def _num_tokens(self, turns: list[dict[str, Any]], tools: Any) -> int:
        return len(self._encode(str(self._apply(turns, tools, tokenize=False))))

    def _without_reasoning(
        self,
        turns: list[dict[str, Any]],
        tools: Any,
        tokens: Sequence[int],
        labelled: Sequence[bool],
    ) -> list[bool]:
        """Copy *labelled* without the tokens of the reasoning that the template writes, and of the tags around it."""
        whole = str(self._apply(turns, tools, tokenize=False))
        remaining = list(labelled)
        for number, turn in enumerate(turns):
            key = next((key for key in REASONING if turn.get(key)), None)
            if key is None or turn["role"] != "assistant":
                continue
            span = self._reasoning_span(turns, tools, whole, number, key)
            if span is None:
                continue
            start, end = span
            first = _num_equal(self._encode(whole[:start]), tokens)
            last = _num_equal(self._encode(whole[:end]), tokens)
            remaining[first:last] = [False] * (last - first)
        return remaining

    def _reasoning_span(
        self, turns: list[dict[str, Any]], tools: Any, whole: str, number: int, key: str
    ) -> _Span | None:
        """Locate the reasoning of message *number*, its value of *key*, in the rendered conversation *whole*.

        Tags that the template writes only around reasoning are part of the span. Returns None if the template does
        not write this reasoning. Raises :class:`UnusableSample` if it writes it in several places.
        """
        marked = self._apply(_replaced(turns, number, key, _MARK), tools, tokenize=False)
        before, mark, after = str(marked).partition(_MARK)
        if not mark:
            return None
        start = len(before)
        end = len(whole) - len(after)
        if end < start or not (whole.startswith(before) and whole.endswith(after)):
            raise UnusableSample(
                "the reasoning cannot be located in the rendered conversation",
                f"{key} of message {number}",
                "set dataset.mask_reasoning false, or use a template that writes the reasoning once and unchanged",
            )
        cleared = str(self._apply(_replaced(turns, number, key, ""), tools, tokenize=False))
        # Where removing a span of the text gives the text without reasoning, the span includes the tags.
        block_start = min(start, _num_equal(whole, cleared))
        block_end = block_start + len(whole) - len(cleared)
        if block_end >= end and whole[block_end:] == cleared[block_start:]:
            return block_start, block_end
        return start, end

    @property
    def writes_the_date(self) -> bool:
        """Whether the template writes the current time, so that samples depend on it."""
        if "strftime_now" not in self.template:
            return False
        # A macro takes precedence over the function of this name that transformers provides.
        watched = replace(self, template=_WATCHED + self.template)
        question = [{"role": "user", "content": "probe"}]
        with suppress(UnusableSample):
            return _MARK in watched._apply(question, None, tokenize=False)
        return False

    # cached_property writes to __dict__: a frozen dataclass allows it, one with slots does not.
    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template writes the text of a content that is a list of parts, rather than the list itself."""
        parts = [{"role": "user", "content": [{"type": "text", "text": "probe"}]}]
        try:
            text = str(self._apply(parts, None, tokenize=False))
        except UnusableSample:
            return False
        writes_list = re.search(r"['\"]type['\"]", text) is not None
        return "probe" in text and not writes_list

    def _with_text_contents(self, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Replace lists of parts by their text, if the template supports only text."""
        has_parts = any(isinstance(turn.get("content"), list) for turn in turns)
        if not has_parts or self.takes_parts:
            return turns
        converted = []
        for turn in turns:
            if "content" in turn:
                turn = turn | {"content": _text_of(turn["content"])}
            converted.append(turn)
        return converted

    @cached_property
    def needs_objects(self) -> bool:
        """Whether the arguments of calls have to be objects: the template fails for JSON text, or puts it in quotes."""
        try:
            text = self._apply(_calling('{"probe": 1}'), None, tokenize=False)
        except UnusableSample:
            return self._renders(_calling({"probe": 1}))
        return '{\\"probe' in str(text)

    def _renders(self, turns: list[dict[str, Any]]) -> bool:
        try:
            self._apply(turns, None, tokenize=False)
        except UnusableSample:
            return False
        return True

    def _with_arguments(self, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Parse the arguments of calls that are JSON text, if the template requires objects."""
        arguments = [call.get("arguments") for turn in turns for call in calls_of(turn)]
        has_text = any(isinstance(each, str) for each in arguments)
        if not has_text or not self.needs_objects:
            return turns
        return [with_functions(turn, _with_arguments_read) for turn in turns]

    def _check_calls_rendered(self, turns: list[dict[str, Any]], tools: Any) -> None:
        """Raise :class:`UnusableSample` if the template omits a tool call.

        Otherwise, the model would be trained to answer nothing in place of a call.
        """
        names = {str(call.get("name")) for turn in turns for call in calls_of(turn)}
        if not names:
            return
        # A mark behind each name, because the name alone may occur elsewhere in the text.
        marked = [with_functions(turn, _with_marked_name) for turn in turns]
        text = str(self._apply(marked, tools, tokenize=False))
        omitted = sorted(name for name in names if name + _MARK not in text)
        if omitted:
            raise UnusableSample(
                "the chat template omits the tool calls in this conversation",
                ", ".join(omitted),
                "set dataset.chat_template to a template that writes tool calls, or remove such conversations",
            )

    def _by_markers(self, turns: list[dict[str, Any]], tools: Any) -> TokenizedSample:
        """Tokenize a conversation. The generation markers of the template determine the labels."""
        # Not transformers' mask of assistant tokens: a character without a token throws it off.
        text, labeled_spans = self._marks(turns, tools)
        try:
            encoded: Any = self.tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
        except NotImplementedError as error:
            raise UnusableSample(
                "the chat template has generation markers, but the tokenizer cannot map tokens to characters",
                type(self.tokenizer).__name__,
                "use a fast tokenizer, or set dataset.chat_template to a template without generation markers",
            ) from error
        spans = [(start, end) for start, end in encoded["offset_mapping"]]
        return TokenizedSample(list(encoded["input_ids"]), _within(spans, labeled_spans))

    def _marks(self, turns: list[dict[str, Any]], tools: Any) -> tuple[str, list[_Span]]:
        """Render a conversation. Returns the text and the spans inside the markers of the turns that have labels."""
        text, spans = self._with_marks(turns, tools)
        answers = [turn for turn in turns if turn["role"] == "assistant"]
        if all(is_trained_on(turn) for turn in answers):
            return text, spans
        labeled: list[_Span] = []
        num_before = 0
        for number, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            _, so_far = self._with_marks(turns[: number + 1], tools)
            # Compare only the starts: some templates end the last turn with another token than the turns before.
            if _starts(so_far) != _starts(spans[: len(so_far)]):
                raise UnusableSample(
                    "the chat template marks different text when more messages follow, so the messages with weight 0 "
                    "cannot be located",
                    f"marks: {len(so_far)} in the first {number + 1} messages, {len(spans)} in total",
                    "remove the weights, or use a template that writes a message the same way at any position",
                )
            if is_trained_on(turn):
                labeled += so_far[num_before:]
            num_before = len(so_far)
        return text, labeled

    def _with_marks(self, turns: list[dict[str, Any]], tools: Any) -> tuple[str, list[_Span]]:
        """Render a conversation. Returns the text and all spans inside the template's markers."""
        render: Any = render_jinja_template
        rendered = [as_rendered(turn) for turn in turns]
        variables = {**self._special_tokens, **self.variables}
        with self._reporting_errors():
            texts, marks = render(
                conversations=[rendered],
                tools=tools,
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **variables,
            )
        return texts[0], [(start, end) for start, end in marks[0]]

    def _by_prefixes(self, turns: list[dict[str, Any]], tools: Any) -> TokenizedSample:
        """Tokenize a conversation. Rendering it up to each assistant turn determines the labels."""
        whole = self._apply(turns, tools, tokenize=False)
        tokens = self._encode(whole)
        labelled = [False] * len(tokens)
        for number in self._labeled_turns(turns):
            # Borders are located in the tokens of the whole text: the text before a border,
            # tokenized alone, may end in other tokens.
            before, after = self._prefixes(turns, tools, number, whole)
            start = _num_equal(self._encode(before), tokens)
            end = len(tokens)
            if after != whole:
                end = _num_equal(self._encode(after), tokens)
            labelled[start:end] = [True] * (end - start)
        return TokenizedSample(tokens, labelled)

    def _labeled_turns(self, turns: list[dict[str, Any]]) -> list[int]:
        numbers = [number for number, turn in enumerate(turns) if is_trained_on(turn)]
        return numbers[-1:] if self.last_only else numbers

    def _prefixes(
        self, turns: list[dict[str, Any]], tools: Any, number: int, whole: str
    ) -> tuple[str, str]:
        """Render the conversation up to the start of the assistant's text in turn *number*, and up to its end.

        *whole* is the text of the whole conversation. Raises :class:`UnusableSample` if one of the returned texts is
        not a prefix of it.
        """
        if number == 0:
            raise UnusableSample(
                "without generation markers, the first message must not be the assistant's: its header is unknown",
                self.method,
                "begin the conversation with a user or system message",
            )
        before = self._apply(turns[:number], tools, tokenize=False, add_generation_prompt=True)
        if self._header and whole.startswith(before + self._header):
            # Some templates write a header without a generation prompt, for example after a tool's result.
            before += self._header
        after = whole
        if number + 1 < len(turns):
            after = self._apply(turns[: number + 1], tools, tokenize=False)
        end = getattr(self.tokenizer, "eos_token", None) or ""
        if not whole.startswith(after) and whole.startswith(after.removesuffix(end)):
            # For example, Phi's template writes the end token after the conversation, not after each turn.
            after = after.removesuffix(end)
        if calls_of(turns[number]):
            after = self._without_header_of_tool(after, turns[: number + 1], tools)
        _require_prefix(before, whole, number)
        _require_prefix(after, whole, number + 1)
        return before, after

    @cached_property
    def _header(self) -> str:
        """The header that the template writes before the assistant's text: its generation prompt."""
        question = [{"role": "user", "content": "probe"}]
        with suppress(UnusableSample):
            asked = str(self._apply(question, None, tokenize=False))
            prompted = str(self._apply(question, None, tokenize=False, add_generation_prompt=True))
            if prompted.startswith(asked):
                return prompted.removeprefix(asked)
        return ""

    def _without_header_of_tool(self, text: str, turns: list[dict[str, Any]], tools: Any) -> str:
        """Remove the header of a tool's result, or its beginning, from the end of *text*.

        *text* is the rendered *turns*, whose last turn calls the tool.
        """
        header = self._header_of_tool(turns, tools)
        for length in range(len(header), 0, -1):
            start = header[:length]
            # What ends the assistant's turn keeps its label, even if a tool's header begins with
            # it.
            ends_turn = self._end_of_turn.startswith(start)
            if text.endswith(start) and start.strip() and not ends_turn:
                return text.removesuffix(start)
        return text

    def _header_of_tool(self, turns: list[dict[str, Any]], tools: Any) -> str:
        """Find the header that the template writes before each result of the tool that the last of *turns* calls."""
        called = calls_of(turns[-1])[0]
        calls = turns[-1].get("tool_calls") or [{}]
        call_id = calls[0].get("id", "probe0000")
        result = {"role": "tool", "name": called.get("name"), "tool_call_id": call_id}
        first = "first probe"
        second = "second probe"
        results = [result | {"content": first}, result | {"content": second}]
        text = ""
        with suppress(UnusableSample):
            text = str(self._apply([*turns, *results], tools, tokenize=False))
        if first not in text or second not in text:
            return ""
        before_first, _, rest = text.partition(first)
        before_second, _, _ = rest.partition(second)
        return self._common_end(before_first, before_second)

    def _common_end(self, first: str, second: str) -> str:
        """Find the longest common suffix of both texts that consists of special tokens and the texts between them."""
        tokenizer = getattr(self.tokenizer, "tokenizer", self.tokenizer)  # the one of a processor
        added = tokenizer.get_added_vocab()
        if not added:
            return ""
        longest_first = sorted(added, key=len, reverse=True)
        # re takes the first alternative that matches: a longer token precedes its own beginning.
        pattern = "|".join(re.escape(token) for token in longest_first)
        parts = re.split(f"({pattern})", first)[::-1]
        others = re.split(f"({pattern})", second)[::-1]
        common = parts[: _num_equal(parts, others)]
        return "".join(reversed(common))

    @cached_property
    def _end_of_turn(self) -> str:
        """The text that the template writes after the assistant's text."""
        answer = "answer of the probe"
        turns = [{"role": "user", "content": "probe"}, {"role": "assistant", "content": answer}]
        with suppress(UnusableSample):
            text = str(self._apply(turns, None, tokenize=False))
            _, _, end = text.partition(answer)
            return end
        return ""

    @property
    def _special_tokens(self) -> dict[str, Any]:
        return dict(self.tokenizer.special_tokens_map)

    def _apply(self, turns: list[dict[str, Any]], tools: Any, **options: Any) -> Any:
        apply: Any = self.tokenizer.apply_chat_template
        rendered = [as_rendered(turn) for turn in turns]
        with self._reporting_errors():
            return apply(
                rendered, tools=tools, chat_template=self.template, **options, **self.variables
            )

    @contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        """Raise the template's errors as :class:`UnusableSample`, including exceeded limits of time and size."""
        bound_chat_templates()
        try:
            yield
        except Exception as error:  # a template can raise anything, for example divide by zero
            value = f"{type(error).__name__}: {error}"
            hint = "correct the conversation, the template, or dataset.template_kwargs"
            raise UnusableSample(
                "the chat template cannot render this conversation", value, hint
            ) from error

    def _encode(self, text: str) -> list[int]:
        # The template has written the special tokens: the tokenizer must not add them again.
        return encode_one(self.tokenizer, text)


def _require_prefix(text: str, whole: str, num_messages: int) -> None:
    """Raise :class:`UnusableSample` unless *text*, the first messages of a conversation, begins the *whole* text."""
    if whole.startswith(text):
        return
    same = _num_equal(text, whole)
    raise UnusableSample(
        f"the chat template writes the first {num_messages} messages differently when more messages follow, so the "
        "assistant's tokens cannot be located",
        f"{text[same : same + 40]!r} becomes {whole[same : same + 40]!r}",
        "set dataset.chat_template to a template with {% generation %} markers, or dataset.learn last",
    )


def _no_labels(turns: list[dict[str, Any]]) -> UnusableSample:
    hint = "remove it, or use the role assistant for the messages to train on"
    if any(turn["role"] == "assistant" for turn in turns):
        hint = "remove it: all of its assistant messages have weight 0"
    if any(map(is_trained_on, turns)):
        hint = "correct the chat template or its generation markers: they mark no assistant token"
    roles = ", ".join(str(turn["role"]) for turn in turns)
    return UnusableSample("this conversation has no assistant token to train on", roles, hint)


@dataclass(frozen=True)
class ConversationEncoder:
    """Tokenizes the conversations in rows, after the *changes* that a recipe asks for.

    A conversation is in *messages_field*, its tools in *tools_field*, if the data has that.
    """

    template: ChatTemplate
    changes: ConversationChanges
    messages_field: str
    tools_field: str

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that are read."""
        return (self.messages_field, _OTHER_FIELD, self.tools_field)

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that the samples depend on besides the rows and the tokenizer."""
        fields = (self.messages_field, self.tools_field)
        return ("messages", *fields, *self.template.key, *self.changes.key)

    def encode(self, rows: Rows) -> list[TokenizedSample]:
        """Make a sample of each row. Raises :class:`RecipeError` with the location of an unusable one."""
        field = self._field_in(rows)
        return conversations(self.template, rows, [field], self.tools_field, self.changes.turns)

    def _field_in(self, rows: Rows) -> str:
        """The field of the conversations, or ShareGPT's if the data has that and not the default one."""
        given = self.messages_field
        if given == _DEFAULT_FIELD and not rows.has_field(given) and rows.has_field(_OTHER_FIELD):
            return _OTHER_FIELD
        return given


def template_of(tokenizer: PreTrainedTokenizerBase, given: str | None) -> str:
    """Return the chat template for *given*, the value of ``dataset.chat_template``.

    A template or the path of a template file gives that template. None, ``original`` and ``training`` select between
    the tokenizer's template and the one that is shipped to replace it
    (:func:`~automodel_ckpt.data.training_templates.select_template`). Raises :class:`RecipeError` if the tokenizer has
    no template or if the file cannot be read.
    """
    if given in CHOICES:
        try:
            return select_template(str(require_tokenizer(tokenizer).get_chat_template()), given)
        except ValueError as error:
            raise RecipeError(
                "the tokenizer has no chat template",
                where="dataset.chat_template",
                value=tokenizer.name_or_path,
                hint="set a template or the path of a template file; tokenizers of instruct models come with one",
            ) from error
    return read_template(given)


def read_template(given: str) -> str:
    """Return the chat template *given*, or the content of the file with this path.

    Raises :class:`RecipeError` if the file cannot be read.
    """
    if "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        hint = "give the path of a text file in UTF-8, or the template itself"
        value = f"{given} ({getattr(error, 'strerror', error)})"
        what = "the chat template cannot be read"
        raise RecipeError(what, where="dataset.chat_template", value=value, hint=hint) from error


def conversations(
    template: ChatTemplate,
    rows: Rows,
    fields: Sequence[str],
    tools_field: str,
    turns: Callable[..., list[dict[str, Any]]],
) -> list[TokenizedSample]:
    """Make a sample of each row: *turns* makes a conversation of the row's values of *fields*.

    If *turns* returns no message, the sample has no token. Raises :class:`RecipeError` with the row's location for a
    row that cannot be used as a conversation.
    """
    columns = rows.columns(fields)
    tools: list[Any] = [None] * len(columns[0])
    if rows.has_field(tools_field):
        tools = rows.values(tools_field)

    def conversation(row: int) -> tuple[list[dict[str, Any]], Any]:
        return turns(*(column[row] for column in columns)), tools[row]

    return conversations_of(template, rows, conversation)


def conversations_of(
    template: ChatTemplate,
    rows: Rows,
    conversation: Callable[[int], tuple[list[dict[str, Any]], Any]],
) -> list[TokenizedSample]:
    """Make a sample of each row n of *rows*: ``conversation(n)`` returns its messages, and its tools or None.

    If there is no message, the sample has no token. Raises :class:`RecipeError` with the row's location if
    *conversation* or *template* raises :class:`UnusableSample`.
    """
    samples = []
    for row in range(rows.num_rows):
        # Without a message, the row is skipped, as every sample without a label.
        sample = TokenizedSample([], [])
        try:
            found, tools = conversation(row)
            if found:
                sample = template.sample(found, tools)
        except UnusableSample as error:
            where = f"sample {rows.number_in_data(row)} ({rows.place(row)})"
            raise RecipeError(
                error.what, where=where, value=error.value, hint=error.hint
            ) from error
        has_empty_answer = any(is_empty(turn) for turn in found)
        samples.append(sample._replace(is_empty=has_empty_answer))
    return samples


def _calling(arguments: str | dict[str, Any]) -> list[dict[str, Any]]:
    """Make a conversation with a tool call, to test how a template writes it."""
    call = {
        "id": "probe0000",
        "type": "function",
        "function": {"name": "probe", "arguments": arguments},
    }
    return [
        {"role": "user", "content": "probe"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


def _with_marked_name(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"name": f"{call.get('name')}{_MARK}"}


def _with_arguments_read(call: dict[str, Any]) -> dict[str, Any]:
    """Parse the arguments of a call if they are JSON text; other calls are returned unchanged."""
    try:
        return call | {"arguments": json.loads(call["arguments"])}
    except (KeyError, TypeError, ValueError):
        return call


def _text_of(content: Any) -> Any:
    """Join the texts of a content that is a list of parts; other contents are returned unchanged.

    Raises :class:`UnusableSample` for a part that is not text.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise UnusableSample(
                "a message has a part that is not text, but the chat template supports only text",
                repr(part)[:80],
                "remove the part; images require a vision-language model and automodel_ckpt.data.vlm.conversations",
            )
        texts.append(text)
    return "".join(texts)


def _replaced(
    turns: list[dict[str, Any]], number: int, key: str, value: str
) -> list[dict[str, Any]]:
    """Copy *turns* with *value* under *key* of message *number*."""
    return [*turns[:number], turns[number] | {key: value}, *turns[number + 1 :]]


def _starts(spans: Sequence[_Span]) -> list[int]:
    return [start for start, _ in spans]


def _within(spans: Sequence[_Span], labeled_spans: Sequence[_Span]) -> list[bool]:
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


def _num_equal(prefix: Sequence[object], whole: Sequence[object]) -> int:
    """Return the length of the common prefix of both sequences.

    For tokens it may be shorter than *prefix*, because the last token of *prefix* may merge with the text after it.
    """
    if len(prefix) <= len(whole) and whole[: len(prefix)] == prefix:
        return len(prefix)
    pairs = zip(prefix, whole, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _last_run(labelled: Sequence[bool]) -> list[bool]:
    """Copy *labelled* with only its last uninterrupted run of True."""
    end = len(labelled)
    while end > 0 and not labelled[end - 1]:
        end -= 1
    start = end
    while start > 0 and labelled[start - 1]:
        start -= 1
    return [start <= number < end for number in range(len(labelled))]
