"""Conversations whose tool calls and results are messages with separate roles, as in the ChatML data of Swift.

A message ``tool_call`` has a call as JSON text, ``{"name": ..., "arguments": ...}``; a message ``tool_response`` has
its result. ShareGPT's speakers ``function_call`` and ``observation`` mean the same. They become the messages that chat
templates expect: ``tool_calls`` of the assistant, and messages with the role ``tool``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

CALL = "tool_call"
RESULT = "tool_response"
_RESULTS = (RESULT, "tool")
_CALL_HINT = (
    'the content of a tool call is {"name": "...", "arguments": {...}}, as an object or JSON text'
)


class InvalidCall(ValueError):
    """The content of a message with the role ``tool_call`` is not a call. *hint* shows the format."""

    hint = _CALL_HINT


def with_tool_calls(turns: Sequence[Any]) -> list[Any]:
    """Replace messages with the roles ``tool_call`` and ``tool_response``; other messages are returned unchanged.

    Consecutive calls become the ``tool_calls`` of one assistant message: of the message before them if it is the
    assistant's and has no calls. Results get the ids of these calls in order. A conversation without such roles is
    returned unchanged. Raises :class:`InvalidCall` for a content that is not a call, and for consecutive calls with
    different weights.
    """
    if not any(_role(turn) in (CALL, RESULT) for turn in turns):
        return list(turns)
    converted: list[Any] = []
    # The ids of the newest calls that have no result yet.
    open_calls: list[str] = []
    num_calls = 0
    continues_calls = False
    for turn in turns:
        role = _role(turn)
        if role == CALL:
            call_id = _call_id(num_calls)
            num_calls += 1
            if not continues_calls:
                open_calls = []
            _add_call(converted, turn, call_id, continues=continues_calls)
            open_calls.append(call_id)
        elif role in _RESULTS:
            converted.append(_result(turn, open_calls))
        else:
            open_calls = []
            converted.append(turn)
        continues_calls = role == CALL
    return converted


def _role(turn: Any) -> Any:
    return turn.get("role") if isinstance(turn, Mapping) else None


def _call_id(number: int) -> str:
    # Nine letters and digits: Mistral's templates require this length.
    return f"call{number:05d}"


def _add_call(
    converted: list[Any], turn: Mapping[str, Any], call_id: str, *, continues: bool
) -> None:
    """Add the call of *turn* to the assistant message that *converted* ends with, or to a new one."""
    call = {"id": call_id, "type": "function", "function": _function(turn.get("content"))}
    last: Any = converted[-1] if converted else None
    is_answer = _role(last) == "assistant"
    if continues or (is_answer and "tool_calls" not in last):
        if turn.get("weight", 1) != last.get("weight", 1):
            raise InvalidCall("consecutive messages of the assistant have different weights")
        calls = [*last.get("tool_calls", []), call]
        converted[-1] = {**last, "tool_calls": calls}
        return
    others = {key: value for key, value in turn.items() if key not in ("role", "content")}
    converted.append({"role": "assistant", "content": "", **others, "tool_calls": [call]})


def _function(content: Any) -> dict[str, Any]:
    if isinstance(content, str):
        try:
            content = json.loads(content)
        except ValueError as error:
            raise InvalidCall("the content of a tool call is not JSON") from error
    name = content.get("name") if isinstance(content, Mapping) else None
    if not isinstance(name, str) or not name:
        raise InvalidCall("a tool call has no name")
    return {"name": name, "arguments": content.get("arguments", {})}


def _result(turn: Mapping[str, Any], open_calls: list[str]) -> dict[str, Any]:
    result = {**turn, "role": "tool"}
    # Templates write the result as text. A message with the role tool may have a list of parts.
    is_text = isinstance(turn.get("content"), str)
    if turn["role"] == RESULT and "content" in turn and not is_text:
        result["content"] = json.dumps(turn["content"], ensure_ascii=False)
    if "tool_call_id" not in result and open_calls:
        result["tool_call_id"] = open_calls.pop(0)
    return result
