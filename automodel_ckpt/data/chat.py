"""Conversations: rows of ``messages``, written out by a chat template, of which the assistant's turns are learnt.

Which tokens are the assistant's is said by the template's ``{% generation %}`` markers. Without them it is found by
rendering the conversation up to each assistant turn, with and without it.
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

from automodel_ckpt.data.encode import Truncation, needed, require_choice
from automodel_ckpt.data.rowstream import DEFAULT_BLOCK, RowStream
from automodel_ckpt.data.samples import samples_of
from automodel_ckpt.data.source import Rows, Source
from automodel_ckpt.data.templates import bound_chat_templates
from automodel_ckpt.data.tokenized import TokenizedDataset, TokenizedSample
from automodel_ckpt.data.training_templates import model_of, select_template
from automodel_ckpt.data.turns import (
    UnusableSample,
    as_rendered,
    calls_of,
    is_empty,
    is_trained_on,
    plain,
    turns_of,
    with_functions,
)
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)

_Span = tuple[int, int]
"""The first character, and the one after the last."""
_MARK = "__shown__"
"""What no text has: it shows whether a template writes something."""
_WATCHED = "{% macro strftime_now(form) %}" + _MARK + "{% endmacro %}"
CHOICES = (None, "original", "training")
"""Values of ``chat_template`` that mean the tokenizer's own, or the shipped one that replaces it."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def messages(
    tokenizer: PreTrainedTokenizerBase,
    path: str | list[str],
    seq_length: int = 2048,
    messages_field: str = "messages",
    tools_field: str = "tools",
    chat_template: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
    learn: Literal["all", "last"] = "all",
    truncation: Literal["error", "right"] = "error",
    max_samples: int | None = None,
    name: str | None = None,
    split: str = "train",
    streaming: bool = False,
    shuffle_block: int = DEFAULT_BLOCK,
) -> TokenizedDataset | RowStream:
    """A sample per conversation, with labels on what the assistant says, its end of turn included.

    A conversation is a list of ``{"role", "content", ...}`` as transformers' ``apply_chat_template`` takes it, or that
    as JSON text; so is what *tools_field* holds, where the data has it. Both reach the template as they are, but for
    contents that are lists of text parts: a template that knows texts only gets their text; and the arguments of
    ``tool_calls`` as JSON text, which a template that needs objects gets as objects.
    What the assistant says in a message with ``"weight": 0`` is not learnt (with ``1``, or without a weight, it is).
    ShareGPT's messages, ``{"from", "value"}``, are read too, mostly in a field ``conversations``.
    *chat_template* is one, or the path of a file with one; without it the tokenizer's, or the training template that is
    shipped in place of that (``original``: the tokenizer's, whatever is shipped; ``training``: the shipped one, or an
    error). *template_kwargs* are its further variables, such as ``enable_thinking``.
    *learn* ``last`` takes the assistant's last turn only. Conversations of more than *seq_length* tokens are rejected
    with their places, or with *truncation* ``right`` cut, or left out where no label remained, with the counts in the
    log. *streaming* as for
    :func:`~automodel_ckpt.data.text.prompt_completion`.

    Raises :class:`RecipeError` with the sample's place for no conversation, for a template that cannot render it or
    does not show which tokens are the assistant's, and for a conversation without any token to learn.
    """
    require_choice("learn", learn, ("all", "last"))
    policy, source = Truncation(truncation, seq_length), Source.of(path, name, split)
    template = ChatTemplate(
        tokenizer, template_of(tokenizer, chat_template), dict(template_kwargs or {}), learn == "last"
    )
    log.info("%s: the assistant's tokens are found by %s", source.path, template.method)
    if template.writes_the_date:
        log.warning(
            "%s: the chat template writes today's date into every sample; for reproducible samples set a fixed date, "
            "for example dataset.template_kwargs.date_string '26 Jul 2024'", source.path,
        )  # fmt: skip

    def encode(rows: Rows) -> list[TokenizedSample]:
        return conversations(template, rows, [messages_field], tools_field, turns_of)

    return samples_of(
        source, tokenizer, encode, policy,
        fields=(messages_field, tools_field), key=("messages", messages_field, tools_field, *template.key),
        max_samples=max_samples, streaming=streaming, shuffle_block=shuffle_block,
    )  # fmt: skip


@dataclass(frozen=True)
class ChatTemplate:
    """Turns a conversation into tokens and labels. Raises :class:`UnusableSample`."""

    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    template: str = field(repr=False)
    variables: dict[str, Any]
    last_only: bool

    @property
    def has_markers(self) -> bool:
        """Whether the template itself marks what the assistant says."""
        return _GENERATION.search(self.template) is not None

    @property
    def method(self) -> str:
        """In words, for the log."""
        if (model := model_of(self.template)) is not None:
            return (
                f"the generation markers of the training template for {model}, which replaces the tokenizer's "
                "(dataset.chat_template original keeps that one)"
            )
        return (
            "the template's generation markers"
            if self.has_markers
            else "rendering the conversation up to each assistant turn"
        )

    @property
    def key(self) -> tuple[object, ...]:
        """All that the samples depend on beside the tokenizer."""
        return self.template, sorted(self.variables.items()), self.last_only

    def sample(self, conversation: list[dict[str, Any]], tools: Any) -> TokenizedSample:
        """The tokens of the whole conversation (of :func:`turns_of`), those of the assistant labelled."""
        turns, offered = self._with_arguments(self._as_taken(conversation)), plain(tools) or None
        self._check_calls_rendered(turns, offered)
        sample = self._marked(turns, offered) if self.has_markers else self._compared(turns, offered)
        labelled = _last_run(sample.labelled) if self.last_only else sample.labelled
        if not any(labelled[1:]):
            raise _no_labels(turns)
        return TokenizedSample(sample.tokens, labelled)

    @property
    def writes_the_date(self) -> bool:
        """Whether the template asks for the present time, which samples then depend on."""
        watched = replace(self, template=_WATCHED + self.template)
        question = [{"role": "user", "content": "probe"}]
        with suppress(UnusableSample):
            return "strftime_now" in self.template and _MARK in watched._apply(question, None, tokenize=False)
        return False

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template writes the text of a content that is a list of parts; others write the list itself."""
        parts = [{"role": "user", "content": [{"type": "text", "text": "probe"}]}]
        try:
            shown = str(self._apply(parts, None, tokenize=False))
        except UnusableSample:
            return False
        return "probe" in shown and not re.search(r"['\"]type['\"]", shown)

    def _as_taken(self, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with a text for each list of parts, where the template knows texts only."""
        if not any(isinstance(turn.get("content"), list) for turn in turns) or self.takes_parts:
            return turns
        return [turn | {"content": _text_of(turn["content"])} if "content" in turn else turn for turn in turns]

    @cached_property
    def needs_objects(self) -> bool:
        """Whether a call's arguments have to be objects: the template fails for JSON text, or writes it in quotes."""
        try:
            shown = self._apply(_calling('{"probe": 1}'), None, tokenize=False)
        except UnusableSample:
            return self._renders(_calling({"probe": 1}))
        return '{\\"probe' in str(shown)

    def _renders(self, turns: list[dict[str, Any]]) -> bool:
        try:
            self._apply(turns, None, tokenize=False)
        except UnusableSample:
            return False
        return True

    def _with_arguments(self, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with objects for those arguments of calls that are JSON text, where the template needs them."""
        if not any(isinstance(call.get("arguments"), str) for turn in turns for call in calls_of(turn)):
            return turns
        return [with_functions(turn, _with_arguments_read) for turn in turns] if self.needs_objects else turns

    def _check_calls_rendered(self, turns: list[dict[str, Any]], tools: Any) -> None:
        """An assistant that only calls a tool would be learnt as one that says nothing."""
        names = {str(call.get("name")) for turn in turns for call in calls_of(turn)}
        if not names:
            return
        marked = [with_functions(turn, lambda call: call | {"name": f"{call.get('name')}{_MARK}"}) for turn in turns]
        text = str(self._apply(marked, tools, tokenize=False))
        lost = sorted(name for name in names if name + _MARK not in text)
        if lost:
            raise UnusableSample(
                "the chat template omits the tool calls in this conversation", ", ".join(lost),
                "set dataset.chat_template to a template that writes tool calls, or remove such conversations",
            )  # fmt: skip

    def _marked(self, turns: list[dict[str, Any]], tools: Any) -> TokenizedSample:
        text, learnt = self._marks(turns, tools)
        try:
            encoded: Any = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        except NotImplementedError as error:
            raise UnusableSample(
                "the chat template has generation markers, but the tokenizer cannot map tokens to characters",
                type(self.tokenizer).__name__,
                "use a fast tokenizer, or set dataset.chat_template to a template without generation markers",
            ) from error
        places = [(start, end) for start, end in encoded["offset_mapping"]]
        return TokenizedSample(list(encoded["input_ids"]), _within(places, learnt))

    def _marks(self, turns: list[dict[str, Any]], tools: Any) -> tuple[str, list[_Span]]:
        """The text of a conversation, and what the markers enclose of the turns that are learnt."""
        text, spans = self._with_marks(turns, tools)
        if all(is_trained_on(turn) for turn in turns if turn["role"] == "assistant"):
            return text, spans
        learnt, num_before = [], 0
        for number in [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]:
            _, so_far = self._with_marks(turns[: number + 1], tools)
            # Only where marks start: some templates end the last turn with another token than those before.
            if _starts(so_far) != _starts(spans[: len(so_far)]):
                raise UnusableSample(
                    "the chat template marks different text when more messages follow, so the messages with weight 0 "
                    "cannot be located",
                    f"marks: {len(so_far)} in the first {number + 1} messages, {len(spans)} in total",
                    "remove the weights, or use a template that writes a message the same way at any position",
                )
            learnt += so_far[num_before:] if is_trained_on(turns[number]) else []
            num_before = len(so_far)
        return text, learnt

    def _with_marks(self, turns: list[dict[str, Any]], tools: Any) -> tuple[str, list[_Span]]:
        """The text of a conversation, and all that the template's markers enclose."""
        render: Any = render_jinja_template
        with self._reporting_errors():
            texts, marks = render(
                conversations=[[as_rendered(turn) for turn in turns]], tools=tools, chat_template=self.template,
                return_assistant_tokens_mask=True, **{**self._special_tokens, **self.variables},
            )  # fmt: skip
        return texts[0], [(start, end) for start, end in marks[0]]

    def _compared(self, turns: list[dict[str, Any]], tools: Any) -> TokenizedSample:
        whole = self._apply(turns, tools, tokenize=False)
        tokens = self._encode(whole)
        labelled = [False] * len(tokens)
        for number in self._labeled_turns(turns):
            before, after = self._prefixes(turns, tools, number, whole)
            start, end = (_num_equal(self._encode(text), tokens) for text in (before, after))
            labelled[start:end] = [True] * (end - start)
        return TokenizedSample(tokens, labelled)

    def _labeled_turns(self, turns: list[dict[str, Any]]) -> list[int]:
        numbers = [number for number, turn in enumerate(turns) if is_trained_on(turn)]
        return numbers[-1:] if self.last_only else numbers

    def _prefixes(self, turns: list[dict[str, Any]], tools: Any, number: int, whole: str) -> tuple[str, str]:
        """The conversation's text up to what the assistant says in a turn, and up to the end of that."""
        if number == 0:
            what = "without generation markers, the first message must not be the assistant's: its header is unknown"
            raise UnusableSample(what, self.method, "begin the conversation with a user or system message")
        before = self._apply(turns[:number], tools, tokenize=False, add_generation_prompt=True)
        if self._header and whole.startswith(before + self._header):
            before += self._header  # written before the answer although it was not prompted, as after a tool's result
        after = self._apply(turns[: number + 1], tools, tokenize=False) if number + 1 < len(turns) else whole
        end = getattr(self.tokenizer, "eos_token", None) or ""
        if not whole.startswith(after) and whole.startswith(after.removesuffix(end)):
            after = after.removesuffix(end)  # as Phi's, which ends a conversation with it, not each turn
        if calls_of(turns[number]):
            after = self._without_header_of_tool(after, turns[: number + 1], tools)
        for text, part in ((before, f"the first {number} messages"), (after, f"the first {number + 1} messages")):
            if not whole.startswith(text):
                same = _num_equal(text, whole)
                raise UnusableSample(
                    f"the chat template writes {part} differently when more messages follow, so the "
                    "assistant's tokens cannot be located",
                    f"{text[same : same + 40]!r} becomes {whole[same : same + 40]!r}",
                    "set dataset.chat_template to a template with {% generation %} markers, or dataset.learn last",
                )
        return before, after

    @cached_property
    def _header(self) -> str:
        """What the template writes before the assistant's words, as a prompt for them."""
        question = [{"role": "user", "content": "probe"}]
        with suppress(UnusableSample):
            asked = str(self._apply(question, None, tokenize=False))
            prompted = str(self._apply(question, None, tokenize=False, add_generation_prompt=True))
            return prompted.removeprefix(asked) if prompted.startswith(asked) else ""
        return ""

    def _without_header_of_tool(self, text: str, turns: list[dict[str, Any]], tools: Any) -> str:
        """*text* of *turns*, the last of which calls a tool, without the header of the tool's result at its end."""
        header = self._header_of_tool(turns, tools)
        for length in range(len(header), 0, -1):
            start = header[:length]
            if text.endswith(start) and start.strip() and not self._end_of_turn.startswith(start):
                return text.removesuffix(start)
        return text

    def _header_of_tool(self, turns: list[dict[str, Any]], tools: Any) -> str:
        """What the template writes before each result of the tool that the last of *turns* calls."""
        name = calls_of(turns[-1])[0].get("name")
        calls = turns[-1].get("tool_calls") or [{}]
        number = calls[0].get("id", "probe0000")
        first, second = "first probe", "second probe"
        results = [{"role": "tool", "name": name, "tool_call_id": number, "content": text} for text in (first, second)]
        with suppress(UnusableSample):
            shown = str(self._apply([*turns, *results], tools, tokenize=False))
            if first in shown and second in shown:
                head, _, rest = shown.partition(first)
                return self._common_end(head, rest.partition(second)[0])
        return ""

    def _common_end(self, first: str, second: str) -> str:
        """The longest text with which both end, of whole special tokens and the texts between them."""
        added = getattr(self.tokenizer, "tokenizer", self.tokenizer).get_added_vocab()
        if not added:
            return ""
        pattern = "|".join(re.escape(token) for token in sorted(added, key=len, reverse=True))
        parts, others = (re.split(f"({pattern})", text)[::-1] for text in (first, second))
        return "".join(parts[: _num_equal(parts, others)][::-1])

    @cached_property
    def _end_of_turn(self) -> str:
        """What the template writes after the words of the assistant."""
        answer = "answer of the probe"
        with suppress(UnusableSample):
            talk = [{"role": "user", "content": "probe"}, {"role": "assistant", "content": answer}]
            return str(self._apply(talk, None, tokenize=False)).partition(answer)[2]
        return ""

    @property
    def _special_tokens(self) -> dict[str, Any]:
        return dict(self.tokenizer.special_tokens_map)

    def _apply(self, turns: list[dict[str, Any]], tools: Any, **options: Any) -> Any:
        apply: Any = self.tokenizer.apply_chat_template
        rendered = [as_rendered(turn) for turn in turns]
        with self._reporting_errors():
            return apply(rendered, tools=tools, chat_template=self.template, **options, **self.variables)

    @contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        """What the template raises as :class:`UnusableSample`, that it takes too long or writes too much included."""
        bound_chat_templates()
        try:
            yield
        except Exception as error:  # a template computes: it may divide by zero
            value = f"{type(error).__name__}: {error}"
            remedy = "correct the conversation, the template, or dataset.template_kwargs"
            raise UnusableSample("the chat template cannot render this conversation", value, remedy) from error

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _no_labels(turns: list[dict[str, Any]]) -> UnusableSample:
    remedy = "remove it, or use the role assistant for the messages to train on"
    if any(turn["role"] == "assistant" for turn in turns):
        remedy = "remove it: all of its assistant messages have weight 0"
    if any(map(is_trained_on, turns)):
        remedy = "correct the chat template or its generation markers: they mark no assistant token"
    roles = ", ".join(str(turn["role"]) for turn in turns)
    return UnusableSample("this conversation has no assistant token to train on", roles, remedy)


def template_of(tokenizer: PreTrainedTokenizerBase, given: str | None) -> str:
    """The chat template that *given* is or names (see :func:`read_template`), or one for the tokenizer's own.

    For the latter, and what else *given* may be, see :func:`~automodel_ckpt.data.training_templates.select_template`.
    :class:`RecipeError` where the tokenizer has none.
    """
    if given in CHOICES:
        try:
            return select_template(str(needed(tokenizer).get_chat_template()), given)
        except ValueError as error:
            raise RecipeError(
                "the tokenizer has no chat template",
                where="dataset.chat_template",
                value=tokenizer.name_or_path,
                remedy="set a template or the path of a template file; tokenizers of instruct models come with one",
            ) from error
    return read_template(given)


def read_template(given: str) -> str:
    """The chat template that *given* is, or that is in the file of this name; :class:`RecipeError` when it is not."""
    if "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        remedy = "give the path of a text file in UTF-8, or the template itself"
        value = f"{given} ({getattr(error, 'strerror', error)})"
        what = "the chat template cannot be read"
        raise RecipeError(what, where="dataset.chat_template", value=value, remedy=remedy) from error


def conversations(
    template: ChatTemplate,
    rows: Rows,
    fields: Sequence[str],
    tools_field: str,
    turns: Callable[..., list[dict[str, Any]]],
) -> list[TokenizedSample]:
    """A sample of each row: *turns* makes a conversation of what the row has in *fields*.

    Raises :class:`RecipeError` with the row's place.
    """
    columns = rows.columns(fields)
    tools = rows.values(tools_field) if rows.has_field(tools_field) else [None] * len(columns[0])
    samples = []
    for row, (values, offered) in enumerate(zip(zip(*columns, strict=True), tools, strict=True)):
        try:
            conversation = turns(*values)
            sample = template.sample(conversation, offered)
        except UnusableSample as error:
            where = f"sample {row} ({rows.place(row)})"
            raise RecipeError(error.what, where=where, value=error.value, remedy=error.remedy) from error
        samples.append(sample._replace(is_empty=any(map(is_empty, conversation))))
    return samples


def _calling(arguments: str | dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation that shows how a template writes calls."""
    call = {"id": "probe0000", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    return [{"role": "user", "content": "probe"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _with_arguments_read(call: dict[str, Any]) -> dict[str, Any]:
    """A call with what its arguments, a text of JSON, hold; any other as it is."""
    try:
        return call | {"arguments": json.loads(call["arguments"])}
    except (KeyError, TypeError, ValueError):
        return call


def _text_of(content: Any) -> Any:
    """The text of a list of parts; anything else as it is."""
    if not isinstance(content, list):
        return content
    given = [part.get("text") if isinstance(part, dict) else part for part in content]
    texts = [text for text in given if isinstance(text, str)]
    if len(texts) < len(given):
        odd = next(part for part, text in zip(content, given, strict=True) if not isinstance(text, str))
        raise UnusableSample(
            "a message has a part that is not text, but the chat template supports only text", repr(odd)[:80],
            "remove the part; images require a vision-language model and automodel_ckpt.data.vlm.conversations",
        )  # fmt: skip
    return "".join(texts)


def _starts(spans: Sequence[_Span]) -> list[int]:
    return [start for start, _ in spans]


def _within(places: Sequence[_Span], spans: Sequence[_Span]) -> list[bool]:
    """For each place whether it has characters in common with one of *spans*; both in the order of the text."""
    rest = list(reversed(spans))
    found = []
    for start, end in places:
        while rest and rest[-1][1] <= start:
            rest.pop()
        found.append(bool(rest) and max(start, rest[-1][0]) < min(end, rest[-1][1]))
    return found


def _num_equal(prefix: Sequence[object], whole: Sequence[object]) -> int:
    """How many items both begin with. Of tokens: all of *prefix*, unless its last grew together with what follows."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prefix, whole, strict=False)))


def _last_run(labelled: Sequence[bool]) -> list[bool]:
    """Only the last unbroken run of labels."""
    end = max((number for number, learnt in enumerate(labelled) if learnt), default=-1) + 1
    start = end - sum(1 for _ in takewhile(bool, reversed(labelled[:end])))
    return [start <= number < end for number in range(len(labelled))]
