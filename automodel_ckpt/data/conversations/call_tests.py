"""Turns of held-out conversations in which the assistant calls tools, with the prompts before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.conversations.call_formats import Call, format_of, read_calls, readers_of
from automodel_ckpt.data.conversations.chat_renderer import ChatRenderer
from automodel_ckpt.data.conversations.chat_template import ChatTemplate
from automodel_ckpt.data.conversations.common_prefix import common_length
from automodel_ckpt.data.conversations.messages import (
    UnusableSample,
    calls_of,
    is_trained_on,
    turns_of,
)
from automodel_ckpt.data.rows.arguments import at_most
from automodel_ckpt.data.rows.rows import RowRange
from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.errors import RecipeError

if TYPE_CHECKING:
    from automodel_ckpt.data.chat import ConversationEncoder

_QUERY, _ANSWERS = "query", "answers"
"""The fields of questions and of calls in xLAM's format."""
_BLOCK = 100
"""Rows that are read at a time, until there are enough turns."""


@dataclass(frozen=True)
class CallTest:
    """The tokens of a *prompt*, and the *calls* with which the assistant has to answer it.

    The answer in the data has *num_answer_tokens* tokens. *end* is the special token that ends it; None if none does.
    """

    prompt: list[int]
    calls: list[Call]
    num_answer_tokens: int
    end: int | None


@dataclass(frozen=True)
class CallTests:
    """The *tests* of a data set. *format* is the name of the format in which the chat template writes calls.

    *num_too_long* turns were skipped because their prompts are too long.
    """

    tests: Sequence[CallTest]
    format: str
    num_too_long: int


@dataclass
class CallTestReader:
    """Makes a test of each turn in which the assistant calls tools, unless its weight is 0.

    The prompt is the conversation before the turn with its tools, rendered by *template*. A turn whose prompt has more
    than *max_tokens* tokens is skipped.
    """

    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    max_tokens: int | None
    num_too_long: int = 0
    format: str | None = None

    def read(
        self,
        source: Source,
        encoder: ConversationEncoder,
        max_samples: int | None,
        limit: int | None,
    ) -> CallTests:
        """Read the first *max_samples* conversations, until there are *limit* tests; None is no limit.

        Raises :class:`RecipeError` with the location of a row that is not a conversation or that the template cannot
        render, if calls cannot be read from what the template writes, and if there is no test.
        """
        tests: list[CallTest] = []
        for test in self._tests(source, encoder, at_most(max_samples, source.num_rows)):
            tests.append(test)
            if len(tests) == limit:
                break
        if not tests:
            raise self._nothing_to_test(source)
        assert self.format is not None, "a test has been made"
        return CallTests(tests, self.format, self.num_too_long)

    def _tests(
        self, source: Source, encoder: ConversationEncoder, num_rows: int
    ) -> Iterator[CallTest]:
        fields, convert = _conversations_in(source, encoder)
        from automodel_ckpt.data.chat import at_row

        for start in range(0, num_rows, _BLOCK):
            rows = RowRange(source, start, min(start + _BLOCK, num_rows), {})
            for row, values in enumerate(zip(*rows.read(fields), strict=True)):
                with at_row(rows, row):
                    found = self._of_conversation(*convert(*values))
                yield from found

    def _of_conversation(self, conversation: list[dict[str, Any]], tools: Any) -> list[CallTest]:
        turns, offered = self.template.prepared(conversation, tools)
        tests = []
        for number, turn in enumerate(turns):
            if number == 0 or not (is_trained_on(turn) and calls_of(turn)):
                continue
            before, answer = _rendered(self.template.renderer, turns[: number + 1], offered)
            prompt = self.template.renderer.encode(before)
            if self.max_tokens is not None and len(prompt) > self.max_tokens:
                self.num_too_long += 1
                continue
            names = [str(call.get("name")) for call in calls_of(turn)]
            tokens = self.template.renderer.encode(answer)
            calls = self._calls_in(tokens, names)
            tests.append(CallTest(prompt, calls, len(tokens), self._end_of(tokens)))
        return tests

    def _calls_in(self, answer: list[int], names: list[str]) -> list[Call]:
        """Read the calls in the tokens of what the template writes, as they are read in generated tokens.

        Both then have what a format leaves out in common, such as the types of values. Raises :class:`UnusableSample`
        if it has no calls of tools with these *names*.
        """
        text = str(self.tokenizer.decode(answer))
        if self.format is None:
            self.format = format_of(self.tokenizer, text, names)
        readers = readers_of(self.tokenizer)
        calls = read_calls(readers[self.format], text) if self.format is not None else []
        if [call.name for call in calls] != names:
            raise UnusableSample(
                "the tool calls that the chat template writes cannot be read",
                repr(text)[:200],
                "remove such conversations, or set dataset.chat_template to a template with one of these formats: "
                + ", ".join(readers),
            )
        return calls

    def _end_of(self, answer: list[int]) -> int | None:
        """Return the special token at the end of an answer; None if there is none, or if it is elsewhere, too.

        The end token of a base model is often another one than that of the chat template.
        """
        special = set(self.tokenizer.all_special_ids)
        length = len(answer)
        while length > 0 and answer[length - 1] not in special:
            length -= 1
        if length == 0 or str(self.tokenizer.decode(answer[length:])).strip():
            return None
        end = answer[length - 1]
        return end if answer.count(end) == 1 else None

    def _nothing_to_test(self, source: Source) -> RecipeError:
        if self.num_too_long:
            return RecipeError(
                "all prompts are too long",
                where="dataset.max_prompt_tokens",
                value=f"{self.num_too_long} prompts have more than {self.max_tokens} tokens",
                hint="raise dataset.max_prompt_tokens, or lower max_new_tokens: both together have to fit into the "
                "model's context",
            )
        return RecipeError(
            "no conversation has a turn in which the assistant calls a tool",
            where="dataset.path",
            value=source.path,
            hint='name data whose messages have tool_calls, such as {"role": "assistant", "tool_calls": [{"function": '
            '{"name": "...", "arguments": {...}}}]}',
        )


def _conversations_in(
    source: Source, encoder: ConversationEncoder
) -> tuple[list[str], Callable[..., tuple[list[dict[str, Any]], Any]]]:
    """Return the fields of conversations, and a function from their values in a row to its messages and tools."""
    field = encoder.field_in(source)
    is_xlam = source.has_field(_QUERY) and source.has_field(_ANSWERS)
    if is_xlam and not source.has_field(field):
        fields = [_QUERY, _ANSWERS, encoder.tools_field]
        source.require(fields)
        from automodel_ckpt.data.function_calls import question_and_calls, schemas

        return fields, lambda query, answers, tools: (
            question_and_calls(query, answers),
            schemas(tools),
        )
    source.require([field])
    if not source.has_field(encoder.tools_field):
        return [field], lambda turns: (turns_of(turns), None)
    return [field, encoder.tools_field], lambda turns, tools: (turns_of(turns), tools)


def _rendered(renderer: ChatRenderer, turns: list[dict[str, Any]], tools: Any) -> tuple[str, str]:
    """Render the prompt for the last of *turns*, and that turn."""
    before = renderer.text(turns[:-1], tools, add_generation_prompt=True)
    whole = renderer.text(turns, tools)
    if renderer.header and whole.startswith(before + renderer.header):
        # Some templates write a header without a generation prompt, for example after a tool's result.
        before += renderer.header
    # A prompt may end with the beginning of a reasoning that the turn does not have.
    return before, whole[common_length(before, whole) :]
