"""What a user should know about a conversation that is trained on: content that is lost or means something else."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

from automodel_ckpt.data.conversations.chat_renderer import BEGIN, END, ChatRenderer
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
    "special tokens in the text of messages, which become control tokens (with special_tokens_as_text: true, "
    "automodel_ckpt.data.chat.messages encodes them as text)"
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
    if not renderer.encodes_as_text and any(_control_tokens(renderer, turn) for turn in turns):
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


def with_control_tokens_marked(renderer: ChatRenderer, turn: Object) -> Object:
    """Copy a message with :data:`BEGIN` and :data:`END` around the special tokens in its text."""

    def marked(text: str) -> str:
        text = text.replace(BEGIN, "").replace(END, "")
        for token in _control_tokens_in(renderer, turn, text):
            text = text.replace(token, BEGIN + token + END)
        return text

    return _with_texts(turn, marked)


def _lost(turns: Turns, whole: str) -> Iterator[bool]:
    position = 0
    for turn in turns:
        for text in _texts(turn):
            for piece in map(str.strip, _THINK.split(text)):
                found = whole.find(piece, position)
                if found >= 0:
                    position = found + len(piece)
                # Templates may write the results of tools as JSON.
                elif piece not in whole and json.dumps(piece, ensure_ascii=False) not in whole:
                    yield json.dumps(piece, ensure_ascii=False)[1:-1] not in whole


def _control_tokens(renderer: ChatRenderer, turn: Object) -> bool:
    return any(_control_tokens_in(renderer, turn, text) for text in _texts(turn))


def _control_tokens_in(renderer: ChatRenderer, turn: Object, text: str) -> frozenset[str]:
    """Return the special tokens in a text of a message.

    An assistant's text may have those that its model writes, such as thinking or calls, but not its end.
    """
    if turn["role"] == "assistant":
        end = renderer.special_tokens.get("eos_token")
        return frozenset([end] if end and end in text else [])
    return renderer.control_tokens.intersection(renderer.token_pattern.findall(text))


def _texts(turn: Object) -> list[str]:
    texts: list[str] = []

    def collect(text: str) -> str:
        texts.append(text)
        return text

    _with_texts(turn, collect)
    return texts


def _with_texts(turn: Object, change: Callable[[str], str]) -> Object:
    """Copy a message with *change* applied to its content, the texts of its parts, and its reasoning."""
    changed = dict(turn)
    for key in ("content", *REASONING):
        value = turn.get(key)
        if isinstance(value, str):
            changed[key] = change(value)
        elif isinstance(value, list):
            changed[key] = [_with_text(part, change) for part in value]
    return changed


def _with_text(part: Any, change: Callable[[str], str]) -> Any:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return part | {"text": change(part["text"])}
    return change(part) if isinstance(part, str) else part
