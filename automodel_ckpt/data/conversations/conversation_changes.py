"""Changes of a conversation before a chat template renders it: which reasoning and which last messages remain."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from automodel_ckpt.data.conversations.messages import REASONING, turns_of


@dataclass(frozen=True)
class ConversationChanges:
    """The changes that a recipe asks for.

    *drop_earlier_reasoning* removes the reasoning from all answers but the last, *end_with_answer* the messages after
    the last answer. With *skip_unanswered*, a conversation without an answer is skipped.
    """

    drop_earlier_reasoning: bool
    end_with_answer: bool
    skip_unanswered: bool

    def turns(self, conversation: Any) -> list[dict[str, Any]]:
        """Return the messages of a conversation with the changes; no message if it is to be skipped.

        Raises :class:`~automodel_ckpt.data.conversations.messages.UnusableSample` if it is not a conversation.
        """
        turns = turns_of(conversation)
        if self.end_with_answer:
            turns = _until_last_answer(turns)
        if self.drop_earlier_reasoning:
            turns = _without_earlier_reasoning(turns)
        if self.skip_unanswered and not any(turn["role"] == "assistant" for turn in turns):
            return []
        return turns

    @property
    def key(self) -> list[str]:
        """The names of the changes that are made."""
        # Without the others, so that the keys of samples that do not need them stay the same.
        return [name for name, is_made in asdict(self).items() if is_made]


def _until_last_answer(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    end = len(turns)
    while end > 0 and turns[end - 1]["role"] != "assistant":
        end -= 1
    # A conversation without an answer stays as it is, and is reported or skipped later.
    return turns[:end] or turns


def _without_earlier_reasoning(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    remaining: list[dict[str, Any]] = []
    is_earlier = False
    for turn in reversed(turns):
        if turn["role"] != "assistant":
            remaining.append(turn)
            continue
        changed = dict(turn)
        if is_earlier:
            for key in REASONING:
                changed.pop(key, None)
        remaining.append(changed)
        is_earlier = True
    remaining.reverse()
    return remaining
