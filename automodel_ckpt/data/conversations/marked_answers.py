"""Locate the assistant's text by the generation markers of a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from automodel_ckpt.data.conversations.chat_renderer import ChatRenderer, Span
from automodel_ckpt.data.conversations.messages import UnusableSample, is_trained_on


def marked_answers(
    renderer: ChatRenderer, turns: list[dict[str, Any]], tools: Any
) -> tuple[str, list[Span]]:
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


def _starts(spans: Sequence[Span]) -> list[int]:
    return [start for start, _ in spans]
