"""Locate the reasoning of the assistant in a rendered conversation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from automodel_ckpt.data.conversations.chat_renderer import MARK, ChatRenderer, Span
from automodel_ckpt.data.conversations.common_prefix import common_length
from automodel_ckpt.data.conversations.messages import REASONING, UnusableSample


def reasoning_spans(
    renderer: ChatRenderer, turns: list[dict[str, Any]], tools: Any, whole: str
) -> Iterator[Span]:
    """Yield the span of each reasoning in the rendered conversation *whole*, with the tags around it.

    Raises :class:`UnusableSample` if the template writes a reasoning in several places.
    """
    for number, turn in enumerate(turns):
        key = next((key for key in REASONING if turn.get(key)), None)
        if key is None or turn["role"] != "assistant":
            continue
        span = _reasoning_span(renderer, turns, tools, whole, number, key)
        if span is not None:
            yield span


def _reasoning_span(
    renderer: ChatRenderer,
    turns: list[dict[str, Any]],
    tools: Any,
    whole: str,
    number: int,
    key: str,
) -> Span | None:
    """Locate the reasoning of message *number*, its value of *key*, in the rendered conversation *whole*.

    Tags that the template writes only around reasoning are part of the span. Returns None if the template does not
    write this reasoning. Raises :class:`UnusableSample` if it writes it in several places.
    """
    marked = renderer.text(_replaced(turns, number, key, MARK), tools)
    before, mark, after = marked.partition(MARK)
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
    cleared = renderer.text(_replaced(turns, number, key, ""), tools)
    # Where removing a span of the text gives the text without reasoning, the span includes the tags.
    block_start = min(start, common_length(whole, cleared))
    block_end = block_start + len(whole) - len(cleared)
    if block_end >= end and whole[block_end:] == cleared[block_start:]:
        return block_start, block_end
    return start, end


def _replaced(
    turns: list[dict[str, Any]], number: int, key: str, value: str
) -> list[dict[str, Any]]:
    """Copy *turns* with *value* under *key* of message *number*."""
    return [*turns[:number], turns[number] | {key: value}, *turns[number + 1 :]]
