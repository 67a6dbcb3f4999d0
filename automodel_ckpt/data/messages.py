"""The messages of a conversation, from the forms that data has them in: ``{"role", "content", ...}`` each.

An optional ``weight`` follows OpenAI's format: an assistant message with weight 0 gets no labels. ``{"from", "value"}``
is ShareGPT's form of a message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

_WEIGHT = "weight"
_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
"""Who speaks, and the role of that."""


class UnusableSample(Exception):
    """A conversation cannot be used as a sample. *hint* states what to change; the caller adds the location."""

    def __init__(self, what: str, value: object, hint: str) -> None:
        super().__init__(what)
        self.what, self.value, self.hint = what, value, hint


def turns_of(conversation: Any) -> list[dict[str, Any]]:
    """The messages of a conversation, or of its JSON text; :class:`UnusableSample` when it is none."""
    given = plain(conversation)
    turns = [_without_absent(_in_roles(turn)) for turn in given] if isinstance(given, list) else []
    if not turns or not all(isinstance(turn, dict) and "role" in turn for turn in turns):
        raise UnusableSample(
            "this is not a conversation",
            repr(conversation)[:80],
            'a conversation is [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]',
        )
    for turn in turns:
        _require_content(turn)
        _require_weight(turn)
    return turns


def prompt_and_completion(prompt: Any, completion: Any) -> list[dict[str, Any]]:
    """Join two lists of messages to one conversation with labels only on the assistant messages of *completion*.

    Raises :class:`UnusableSample` if one of them is not a list, or if both parts of one answer are separated.
    """
    asked, answered = prompt, completion
    if not isinstance(asked, list) or not isinstance(answered, list):
        odd, other = (
            ("prompt", "completion") if isinstance(answered, list) else ("completion", "prompt")
        )
        raise UnusableSample(
            f"the {odd} is not a list of messages, but the {other} is",
            repr(prompt if odd == "prompt" else completion)[:80],
            "provide both as lists of messages, or both as text",
        )
    before, after = ([_in_roles(turn) for turn in part] for part in (asked, answered))
    if [turn.get("role") for turn in (*before[-1:], *after[:1]) if isinstance(turn, dict)] == [
        "assistant"
    ] * 2:
        raise UnusableSample(
            "the completion continues the assistant's message in the prompt",
            repr(before[-1])[:80],
            "move the whole message into the completion",
        )
    return turns_of(
        [turn | {_WEIGHT: 0} if isinstance(turn, dict) else turn for turn in before] + after
    )


def is_trained_on(turn: Mapping[str, Any]) -> bool:
    """Whether a message gets labels: it is the assistant's and its weight is not 0."""
    return turn["role"] == "assistant" and turn.get(_WEIGHT) != 0


def is_empty(turn: Mapping[str, Any]) -> bool:
    """Whether a message gets labels but has neither text nor calls."""
    others = turn.keys() - {"role", "name", "content", _WEIGHT}
    content = turn.get("content")
    return is_trained_on(turn) and not others and isinstance(content, str) and not content.strip()


def as_rendered(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A message as it is passed to the chat template, without its weight."""
    return {key: value for key, value in turn.items() if key != _WEIGHT}


def plain(value: Any) -> Any:
    """*value*, parsed if it is JSON text. Raises :class:`UnusableSample` for text that is not JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise UnusableSample("this is not JSON", value[:80], "correct this sample") from error


def calls_of(turn: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The functions, with name and arguments, that a message calls, in any of the formats for calls."""
    calls = [turn.get("function_call"), *(turn.get("tool_calls") or [])]
    return [call.get("function") or call for call in calls if isinstance(call, dict)]


def with_functions(
    turn: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """A copy of a message in which *change* replaced each function call."""
    changed = dict(turn)
    if isinstance(turn.get("function_call"), dict):
        changed["function_call"] = change(turn["function_call"])
    if isinstance(turn.get("tool_calls"), list):
        changed["tool_calls"] = [_changed(call, change) for call in turn["tool_calls"]]
    return changed


def _changed(call: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if not isinstance(call, dict):
        return call
    return (
        call | {"function": change(call["function"])}
        if isinstance(call.get("function"), dict)
        else change(call)
    )


def _without_absent(turn: Any) -> Any:
    """A message without its null keys. They mean the same as absent ones; transformers drops them, too."""
    if not isinstance(turn, dict):
        return turn
    return {key: value for key, value in turn.items() if value is not None}


def _in_roles(turn: Any) -> Any:
    """A message of ShareGPT's form with role and content; anything else as it is."""
    if not isinstance(turn, dict) or "role" in turn or "from" not in turn:
        return turn
    speaker = turn["from"]
    if speaker not in _SHAREGPT:
        raise UnusableSample(
            "unknown speaker of a message",
            f"from: {speaker!r}",
            f"use one of {', '.join(_SHAREGPT)}; or write the conversation with role and content",
        )
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    said = {"content": turn["value"]} if "value" in turn else {}
    return {"role": _SHAREGPT[speaker], **said, **rest}


def _require_content(turn: dict[str, Any]) -> None:
    if turn.keys() <= {
        "role",
        "name",
        _WEIGHT,
    }:  # templates write nothing for it, or the word None, to be learned
        raise UnusableSample(
            "a message has no content",
            repr(turn)[:80],
            "add content or tool_calls, or remove the message",
        )
    content = turn.get("content", "")
    if not isinstance(content, str | list) and turn["role"] in ("system", "user", "assistant"):
        hint = 'use text, or a list of parts such as {"type": "text", "text": "..."}'
        raise UnusableSample(
            "a message's content is neither text nor a list of parts", repr(content)[:80], hint
        )


def _require_weight(turn: dict[str, Any]) -> None:
    weight = turn.get(_WEIGHT, 0)
    if weight not in (0, 1):
        hint = (
            "use 0 for assistant messages to exclude from training, 1 (or no weight) for the others"
        )
        raise UnusableSample(
            "a message's weight is neither 0 nor 1", f"{_WEIGHT}: {weight!r}", hint
        )
    if weight and turn["role"] != "assistant":
        hint = "remove the weight or set it to 0: only assistant messages are trained on"
        raise UnusableSample(
            "a message that is not the assistant's has a weight", f"role: {turn['role']}", hint
        )


def without_nulls(value: Any) -> Any:
    """*value* without the nulls with which a typed table fills the keys that only other rows have."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
