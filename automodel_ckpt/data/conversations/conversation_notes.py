"""What a user should know about a conversation that is trained on: content that is lost or means something else."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Iterator
from itertools import chain

from automodel_ckpt.data.conversations.chat_renderer import ChatRenderer
from automodel_ckpt.data.conversations.messages import (
    KEYS,
    REASONING,
    ROLES,
    Object,
    Turns,
)
from automodel_ckpt.errors import printable

log = logging.getLogger(__name__)

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
