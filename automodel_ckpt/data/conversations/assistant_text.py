"""Locate the assistant's text and its reasoning in what a chat template writes.

The text is found by the generation markers of the template, or by rendering the conversation up to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from automodel_ckpt.data.conversations.chat_renderer import MARK, ChatRenderer, Span, common_length
from automodel_ckpt.data.conversations.messages import (
    REASONING,
    Turns,
    UnusableSample,
    calls_of,
    is_trained_on,
)

METHOD = "rendering the conversation up to each assistant turn"


def answer_span(
    renderer: ChatRenderer, turns: Turns, tools: Any, number: int, whole: str
) -> tuple[Span, bool]:
    """Locate the assistant's text of turn *number* in *whole*, the text of the whole conversation.

    Returns its span, and whether the template writes the turns up to here in another way when no more messages follow.
    Raises :class:`UnusableSample` if that is impossible.
    """
    try:
        if number == 0:
            raise UnusableSample(
                "the first message is the assistant's, and its text cannot be found in what the chat template writes",
                METHOD,
                "begin the conversation with a user or system message",
            )
        return _by_prefixes(renderer, turns, tools, number, whole), False
    except UnusableSample:
        located = _located(renderer, turns, tools, number, whole)
        if located is None:
            raise
        return located, number > 0


def _located(
    renderer: ChatRenderer, turns: Turns, tools: Any, number: int, whole: str
) -> Span | None:
    """Locate the assistant's text of turn *number* by what changes in the text with another content of the turn.

    Returns None when the template does not write the content once and unchanged before the end of the turn.
    """
    turn = turns[number]
    if not isinstance(turn.get("content", ""), str):
        return None
    changed = [*turns[:number], turn | {"content": MARK}, *turns[number + 1 :]]
    try:
        before, mark, rest = renderer.text(changed, tools).partition(MARK)
    except UnusableSample:
        return None
    if not mark or MARK in rest or not whole.startswith(before):
        return None
    if number + 1 == len(turns):
        return len(before), len(whole)
    end = renderer.end_of_turn
    if calls_of(turn):
        # A template may write other white space between the content and the calls if there is content.
        end_of_text = whole.find(end.strip() or MARK, len(before))
        end = end[len(end) - len(end.lstrip()) :]
    else:
        end_of_text = len(whole) - len(rest) if whole.endswith(rest) else -1
    if end_of_text < len(before):
        return None
    return len(before), end_of_text + common_length(whole[end_of_text:], end)


def _by_prefixes(renderer: ChatRenderer, turns: Turns, tools: Any, number: int, whole: str) -> Span:
    """Render the conversation up to the start of the assistant's text in turn *number*, and up to its end.

    Raises :class:`UnusableSample` if one of the returned texts is not a prefix of *whole*.
    """
    before = renderer.text(turns[:number], tools, add_generation_prompt=True)
    if renderer.header and whole.startswith(before + renderer.header):
        # Some templates write a header without a generation prompt, for example after a tool's result.
        before += renderer.header
    after = whole
    if number + 1 < len(turns):
        after = renderer.text(turns[: number + 1], tools)
    end = getattr(renderer.tokenizer, "eos_token", None) or ""
    if not whole.startswith(after) and whole.startswith(after.removesuffix(end)):
        # For example, Phi's template writes the end token after the conversation, not after each turn.
        after = after.removesuffix(end)
    if calls_of(turns[number]):
        after = _without_header_of_tool(renderer, after, turns[: number + 1], tools)
    for text, num_messages in ((before, number), (after, number + 1)):
        if not whole.startswith(text):
            same = common_length(text, whole)
            raise UnusableSample(
                f"the chat template writes the first {num_messages} messages differently when more messages follow, "
                "so the assistant's tokens cannot be located",
                f"{text[same : same + 40]!r} becomes {whole[same : same + 40]!r}",
                "set dataset.chat_template to a template with {% generation %} markers, or dataset.learn last",
            )
    return len(before), len(after)


def _without_header_of_tool(renderer: ChatRenderer, text: str, turns: Turns, tools: Any) -> str:
    """Remove the header of a tool's result, or its beginning, from the end of *text*.

    *text* is the rendered *turns*. The last turn calls the tool.
    """
    header = _header_of_tool(renderer, turns, tools)
    for length in range(len(header), 0, -1):
        start = header[:length]
        # What ends the assistant's turn keeps its label, even if a tool's header begins with it.
        ends_turn = renderer.end_of_turn.startswith(start)
        if text.endswith(start) and start.strip() and not ends_turn:
            return text.removesuffix(start)
    return text


def _header_of_tool(renderer: ChatRenderer, turns: Turns, tools: Any) -> str:
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
        text = renderer.text([*turns, *results], tools)
    if first not in text or second not in text:
        return ""
    before_first, _, rest = text.partition(first)
    before_second, _, _ = rest.partition(second)
    return _common_end(renderer, before_first, before_second)


def _common_end(renderer: ChatRenderer, first: str, second: str) -> str:
    """Find the longest common suffix of both texts that consists of special tokens and the texts between them."""
    added = renderer.inner.get_added_vocab()
    if not added:
        return ""
    longest_first = sorted(added, key=len, reverse=True)
    # re takes the first alternative that matches: a longer token precedes its own beginning.
    pattern = "|".join(re.escape(token) for token in longest_first)
    parts = re.split(f"({pattern})", first)[::-1]
    others = re.split(f"({pattern})", second)[::-1]
    common = parts[: common_length(parts, others)]
    return "".join(reversed(common))


def marked_answers(renderer: ChatRenderer, turns: Turns, tools: Any) -> tuple[str, list[Span]]:
    """Render a conversation. Returns the text and the spans inside the markers of the turns that have labels.

    Raises :class:`UnusableSample` if a turn has weight 0 and the template marks it differently when more turns follow.
    """
    text, spans = renderer.text_with_marks(turns, tools)
    answers = [turn for turn in turns if turn["role"] == "assistant"]
    if all(is_trained_on(turn) for turn in answers):
        return text, spans
    labeled: list[Span] = []
    num_before = 0
    for number, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        _, so_far = renderer.text_with_marks(turns[: number + 1], tools)
        # Compare only the starts: some templates end the last turn with another token than the turns before.
        starts = [start for start, _ in so_far]
        if starts != [start for start, _ in spans[: len(so_far)]]:
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


def reasoning_spans(renderer: ChatRenderer, turns: Turns, tools: Any, whole: str) -> Iterator[Span]:
    """Yield the span of each reasoning in the rendered conversation *whole*.

    Tags that the template writes only around reasoning are part of the span. Raises :class:`UnusableSample` if the
    template writes a reasoning in several places.
    """
    for number, turn in enumerate(turns):
        key = next((key for key in REASONING if turn.get(key)), None)
        if key is None or turn["role"] != "assistant":
            continue
        marked, cleared = (
            renderer.text([*turns[:number], turn | {key: value}, *turns[number + 1 :]], tools)
            for value in (MARK, "")
        )
        before, mark, after = marked.partition(MARK)
        if not mark:
            continue
        start, end = len(before), len(whole) - len(after)
        if end < start or not (whole.startswith(before) and whole.endswith(after)):
            raise UnusableSample(
                "the reasoning cannot be located in the rendered conversation",
                f"{key} of message {number}",
                "set dataset.mask_reasoning false, or use a template that writes the reasoning once and unchanged",
            )
        # Where removing a span of the text gives the text without reasoning, the span includes the tags.
        block_start = min(start, common_length(whole, cleared))
        block_end = block_start + len(whole) - len(cleared)
        if block_end >= end and whole[block_end:] == cleared[block_start:]:
            start, end = block_start, block_end
        yield start, end
