"""Parse and check the messages of a conversation: ``{"role", "content", ...}``, or ShareGPT's ``{"from", "value"}``.

An optional ``weight`` follows OpenAI's format: an assistant message with weight 0 gets no labels. Other programs have
other keys for it, which are read as a weight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from automodel_ckpt.errors import RecipeError

if TYPE_CHECKING:
    from automodel_ckpt.data.rows.rows import Rows

Object = dict[str, Any]
"""A JSON object: a message, a part of one, or a call."""
Turns = list[Object]
"""The messages of a conversation."""
_WEIGHT = "weight"
_MAX_SHOWN = 400
"""Characters of a value in a message."""
CALL = "tool_call"
RESULT = "tool_response"
"""Roles of messages that are one call of a tool, ``{"name", "arguments"}`` as JSON text, or its result (Swift)."""
_TRAINS = ("train", "training", "trainable", "loss", "train_on_turn")
"""Keys of other programs for whether a message gets labels: true or false."""
_UNCLEAR = ("mask", "masked", "loss_mask", "loss_weight", "train_detail", "training_detail")
"""Keys that exclude messages from training, or parts of them, by values that differ between programs."""
_TEXTS = ("value", "text")
"""Keys for the content of a message that has no ``content``."""
_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function_call": CALL,
    "tool_call": CALL,
    "observation": RESULT,
    "tool_response": RESULT,
}
"""ShareGPT's speaker -> role."""
ROLES = ("user", "assistant", "system", "developer", "tool", "function", "ipython")
"""The roles of usual chat templates."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message for the reasoning before an answer. Chat templates read one of them."""
CONTENTS = ("content", "tool_calls", "function_call", *REASONING)
"""Keys of what a message says."""
KEYS = ("role", "name", "tool_call_id", _WEIGHT, *CONTENTS)
"""The keys of a message that this module or most chat templates read."""


class UnusableSample(Exception):
    """A conversation cannot be used as a sample. *hint* states what to change; the caller adds the location."""

    def __init__(
        self, what: str, value: object, hint: str = "correct or remove this sample"
    ) -> None:
        super().__init__(what)
        self.what = what
        self.value = (value if isinstance(value, str) else repr(value))[:_MAX_SHOWN]
        self.hint = hint


def with_tool_calls(turns: Sequence[Any]) -> list[Any]:
    """Replace messages with the roles ``tool_call`` and ``tool_response``; other messages are returned unchanged.

    Consecutive calls become the ``tool_calls`` of one assistant message: of the message before them if it is the
    assistant's and has no calls. Results get the ids of these calls in order. A conversation without such roles is
    returned unchanged. Raises :class:`UnusableSample` for a content that is not a call, and for consecutive calls with
    different weights.
    """
    if not any(_role(turn) in (CALL, RESULT) for turn in turns):
        return list(turns)
    converted: list[Any] = []
    # The ids of the newest calls that have no result yet.
    open_calls: list[str] = []
    num_calls = 0
    last_role = None
    for turn in turns:
        role = _role(turn)
        continues = role == last_role == CALL
        if role not in (RESULT, "tool") and not continues:
            open_calls = []
        if role == CALL:
            # Nine letters and digits: Mistral's templates require this length.
            open_calls.append(f"call{num_calls:05d}")
            num_calls += 1
            _add_call(converted, turn, open_calls[-1], continues=continues)
        elif role in (RESULT, "tool"):
            result = {**turn, "role": "tool"}
            # Templates write the result as text. A message with the role tool may have a list of parts.
            if role == RESULT and not isinstance(turn.get("content", ""), str):
                result["content"] = json.dumps(turn["content"], ensure_ascii=False)
            if open_calls and "tool_call_id" not in result:
                result["tool_call_id"] = open_calls.pop(0)
            converted.append(result)
        else:
            converted.append(turn)
        last_role = role
    return converted


def _role(turn: Any) -> Any:
    return turn.get("role") if isinstance(turn, Mapping) else None


def _add_call(
    converted: list[Any], turn: Mapping[str, Any], call_id: str, *, continues: bool
) -> None:
    """Add the call of *turn* to the assistant message that *converted* ends with, or to a new one."""
    call = {"id": call_id, "type": "function", "function": _function(turn.get("content"))}
    last: Any = converted[-1] if converted else None
    is_answer = _role(last) == "assistant"
    if continues or (is_answer and "tool_calls" not in last):
        if turn.get("weight", 1) != last.get("weight", 1):
            raise _invalid_call(turn)
        calls = [*last.get("tool_calls", []), call]
        converted[-1] = {**last, "tool_calls": calls}
        return
    others = {key: value for key, value in turn.items() if key not in ("role", "content")}
    converted.append({"role": "assistant", "content": "", **others, "tool_calls": [call]})


def _function(content: Any) -> Object:
    call = parsed(content)
    name = call.get("name") if isinstance(call, Mapping) else None
    if not isinstance(name, str) or not name:
        raise _invalid_call(content)
    return {"name": name, "arguments": call.get("arguments", {})}


def _invalid_call(value: Any) -> UnusableSample:
    return UnusableSample(
        "a tool call has no name, or another weight than the message that it continues",
        value,
        'the content of a tool call is {"name": "...", "arguments": {...}}, as an object or JSON text',
    )


@contextmanager
def at_row(rows: Rows, row: int) -> Iterator[None]:
    """Raise an :class:`UnusableSample` of the block as :class:`RecipeError` with the location of the row."""
    try:
        yield
    except UnusableSample as error:
        raise RecipeError(
            error.what, where=rows.place(row), value=error.value, hint=error.hint
        ) from error


def turns_of(conversation: Any) -> Turns:
    """Return the messages of a conversation, or of its JSON text. Raises :class:`UnusableSample` if it is not one."""
    given = parsed(conversation)
    turns = []
    if isinstance(given, list):
        turns = [_usual(turn) for turn in given]
        turns = with_tool_calls(turns)
    are_messages = all(isinstance(turn, dict) and "role" in turn for turn in turns)
    if not turns or not are_messages:
        raise UnusableSample(
            "this is not a conversation",
            conversation,
            'a conversation is [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]',
        )
    for turn in turns:
        _require_content(turn)
        _require_weight(turn)
    return turns


def prompt_and_completion(prompt: Any, completion: Any) -> Turns:
    """Join two lists of messages to one conversation with labels only on the assistant messages of *completion*.

    Raises :class:`UnusableSample` if one of them is not a list, or if one answer is divided between them.
    """
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise UnusableSample(
            "a prompt or a completion is not a list of messages",
            f"{prompt!r}, {completion!r}",
            "provide the prompt and the completion as lists of messages, or both as text",
        )
    before = [_usual(turn) for turn in prompt]
    after = [_usual(turn) for turn in completion]
    if len(after) > len(before) and after[: len(before)] == before:
        # The completion is the whole conversation.
        after = after[len(before) :]
    if before and after and _role(before[-1]) == _role(after[0]) == "assistant":
        raise UnusableSample(
            "the completion continues the assistant's message in the prompt",
            before[-1],
            "move the whole message into the completion",
        )
    turns = [turn | {_WEIGHT: 0} if isinstance(turn, dict) else turn for turn in before]
    return turns_of(turns + after)


def is_trained_on(turn: Mapping[str, Any]) -> bool:
    """Whether a message gets labels: it is the assistant's and its weight is not 0."""
    return turn["role"] == "assistant" and turn.get(_WEIGHT) != 0


def is_empty(turn: Mapping[str, Any]) -> bool:
    """Whether a message gets labels but has neither text nor calls."""
    others = turn.keys() - {"role", "name", "content", _WEIGHT}
    content = turn.get("content")
    return is_trained_on(turn) and not others and isinstance(content, str) and not content.strip()


def as_rendered(turn: Mapping[str, Any]) -> Object:
    """Copy a message for the chat template, without its weight."""
    return {key: value for key, value in turn.items() if key != _WEIGHT}


def parsed(value: Any) -> Any:
    """Parse *value* if it is JSON text. Raises :class:`UnusableSample` for text that is not JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise UnusableSample("this is not JSON", value) from error


def calls_of(turn: Mapping[str, Any]) -> Turns:
    """List the functions, with name and arguments, that a message calls, in any of the formats for calls."""
    calls = [turn.get("function_call"), *(turn.get("tool_calls") or [])]
    return [call.get("function") or call for call in calls if isinstance(call, dict)]


def with_functions(turn: Object, change: Callable[[Object], Object]) -> Object:
    """Copy a message, with each function call replaced by *change*."""
    changed = dict(turn)
    if isinstance(turn.get("function_call"), dict):
        changed["function_call"] = change(turn["function_call"])
    if isinstance(turn.get("tool_calls"), list):
        changed["tool_calls"] = calls = list(turn["tool_calls"])
        for number, call in enumerate(calls):
            if isinstance(call, dict) and isinstance(call.get("function"), dict):
                calls[number] = call | {"function": change(call["function"])}
            elif isinstance(call, dict):
                calls[number] = change(call)
    return changed


def _usual(turn: Any) -> Any:
    """Convert a message to the usual keys and roles. A value that is not a message is returned unchanged.

    Null values mean that a key is missing, as in transformers.
    """
    if not isinstance(turn, dict):
        return turn
    # Only the keys of the message: a null in the arguments of a call is a value.
    turn = {key: value for key, value in turn.items() if value is not None}
    if "role" not in turn and "from" in turn:
        speaker = turn.pop("from")
        if speaker not in _SHAREGPT:
            raise UnusableSample(
                "unknown speaker of a message",
                f"from: {speaker!r}",
                f"use one of {', '.join(_SHAREGPT)}; or write the conversation with role and content",
            )
        turn = {"role": speaker, **turn}
    role = turn.get("role")
    if isinstance(role, str):
        turn["role"] = _SHAREGPT.get(role, role)
    found = next((key for key in _TEXTS if key in turn), None)
    if found is not None and turn.keys().isdisjoint(("content", "tool_calls", "function_call")):
        turn["content"] = turn.pop(found)
    return _weighted(turn)


def _weighted(turn: Object) -> Object:
    """Replace the keys of other programs that exclude a message from training by a weight."""
    unclear = next((key for key in _UNCLEAR if key in turn), None)
    if unclear is not None:
        raise UnusableSample(
            "a message has a key whose meaning differs between programs",
            f"{unclear}: {turn[unclear]!r}",
            "use weight 0 for assistant messages to exclude from training, and remove this key",
        )
    for key in _TRAINS:
        if key not in turn:
            continue
        value = turn.pop(key)
        if value not in (0, 1) or turn.setdefault(_WEIGHT, int(value)) != value:
            raise UnusableSample(
                "a message's key for training is neither true nor false, or differs from its weight",
                f"{_WEIGHT}: {turn.get(_WEIGHT)!r}, {key}: {value!r}",
                "use weight 0 for assistant messages to exclude from training, and remove this key",
            )
    return turn


def _require_content(turn: Object) -> None:
    # Templates write nothing for such a message, or the word None, which the model would be trained on.
    if turn.keys().isdisjoint((*CONTENTS, "tool_call_id")):
        raise UnusableSample(
            "a message has no content",
            turn,
            "add content or tool_calls, or remove the message",
        )
    content = turn.get("content", "")
    if not isinstance(content, str | list) and turn["role"] in ("system", "user", "assistant"):
        hint = 'use text, or a list of parts such as {"type": "text", "text": "..."}'
        raise UnusableSample(
            "a message's content is neither text nor a list of parts", content, hint
        )


def _require_weight(turn: Object) -> None:
    weight = turn.get(_WEIGHT, 0)
    if weight not in (0, 1) or (weight and turn["role"] != "assistant"):
        raise UnusableSample(
            "a message's weight is neither 0 nor 1, or the message is not the assistant's",
            f"{_WEIGHT}: {weight!r}, role: {turn['role']}",
            "use 0 for assistant messages to exclude from training; only assistant messages are trained on",
        )


def without_nulls(value: Any) -> Any:
    """Copy *value* without nulls: typed tables such as Parquet contain them for keys that only other rows have."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
