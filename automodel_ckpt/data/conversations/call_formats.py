"""Tool calls in generated text: the formats in which chat templates write them, and how to compare calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True, order=True)
class Call:
    """A call of a tool. Calls are equal if their names are, and their arguments as JSON values.

    *arguments* is JSON text with sorted keys, in which integral numbers have no fraction.
    """

    name: str
    arguments: str

    @classmethod
    def of(cls, given: Any) -> Call:
        """Make a call of ``{"name": ..., "arguments": ...}``.

        Llama's key ``parameters``, arguments as JSON text, and OpenAI's ``{"function": {...}}`` are accepted too.
        Raises ValueError for anything else.
        """
        function = given.get("function", given) if isinstance(given, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError("a call has no name")
        arguments = function.get("arguments", function.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, Mapping):
            raise ValueError("the arguments of a call are not an object")
        return cls(
            function["name"], json.dumps(_plain(arguments), sort_keys=True, ensure_ascii=False)
        )

    def __str__(self) -> str:
        return f"{self.name}({self.arguments})"


Reader = Callable[[str], list[Call]]
"""Lists the calls in a text; none if there are none. Raises ValueError for calls that cannot be read."""


def read_calls(read: Reader, text: str) -> list[Call]:
    """List the calls in a generated *text*; none if one of them cannot be read."""
    try:
        return read(text)
    except (ValueError, RecursionError):  # deeply nested brackets
        return []


def _plain(value: Any) -> Any:
    """Copy a JSON value with integral numbers as integers: JSON does not distinguish 1 from 1.0."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _json_values(text: str) -> Iterator[Any]:
    """Yield the objects and lists in a text that are JSON and no part of another one."""
    decoder = json.JSONDecoder()
    position = 0
    while (found := re.compile(r"[{\[]").search(text, position)) is not None:
        position = found.start() + 1
        try:
            value, position = decoder.raw_decode(text, found.start())
        except ValueError:
            continue
        yield value


def _is_call(value: Any) -> bool:
    return isinstance(value, Mapping) and not value.keys().isdisjoint(
        ("arguments", "parameters", "function")
    )


def _bare(text: str) -> list[Call]:
    """Read JSON anywhere in the text: calls, lists of them, or ``{"tool_calls": [...]}``, fenced or not."""
    calls = []
    for value in _json_values(text):
        if isinstance(value, Mapping) and isinstance(value.get("tool_calls"), list):
            value = value["tool_calls"]
        several = value if isinstance(value, list) else [value]
        calls += [Call.of(each) for each in several if _is_call(each)]
    return calls


def _tagged(text: str) -> list[Call]:
    """Read ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``, repeated."""
    contents = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
    return [Call.of(json.loads(content)) for content in contents]


def _listed(text: str) -> list[Call]:
    """Read ``[TOOL_CALLS] [{"name": ..., "arguments": ...}, ...]``."""
    _, mark, rest = text.partition("[TOOL_CALLS]")
    if not mark:
        return []
    calls, _ = json.JSONDecoder().raw_decode(rest.lstrip())
    return [Call.of(call) for call in calls]


def _named(pattern: str, text: str) -> list[Call]:
    """Read calls by a *pattern* whose groups are the name of a call and its arguments as JSON."""
    calls = []
    for name, arguments in re.findall(pattern, text, re.DOTALL):
        calls.append(Call.of({"name": name, "arguments": arguments}))
    return calls


def _in_pairs(pattern: str, pair: str, text: str) -> list[Call]:
    """Read calls by a *pattern* whose groups are the name of a call and its arguments, each of which matches *pair*.

    Values remain texts, because the format does not distinguish ``1`` from ``"1"``.
    """
    calls = []
    for name, arguments in re.findall(pattern, text, re.DOTALL):
        pairs = dict(re.findall(pair, arguments, re.DOTALL))
        if re.sub(pair, "", arguments, flags=re.DOTALL).strip():
            raise ValueError("there is something between the arguments of a call")
        calls.append(Call.of({"name": name, "arguments": pairs}))
    return calls


def _without_quotes(text: str) -> list[Call]:
    """Read ``<|tool_call>call:NAME{key:<|"|>text<|"|>,other:1}<tool_call|>``, repeated."""
    calls = []
    pattern = r"<\|tool_call>call:([^\s{]+)(\{.*?\})<tool_call\|>"
    for name, arguments in re.findall(pattern, text, re.DOTALL):
        # Every second part is a text. Keys in the other parts have no quotes.
        parts = arguments.split('<|"|>')
        parts[::2] = [
            re.sub(r"([{,]\s*)([^\s{},:\[\]]+):", r'\1"\2":', part) for part in parts[::2]
        ]
        parts[1::2] = [json.dumps(part) for part in parts[1::2]]
        calls.append(Call.of({"name": name, "arguments": "".join(parts)}))
    return calls


_READERS: dict[str, Reader] = {
    "JSON in <tool_call>": _tagged,
    "<function=NAME>": partial(
        _in_pairs,
        r"<function=([^>\n]+)>(.*?)</function>",
        r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>",
    ),
    "<arg_key>": partial(
        _in_pairs,
        r"<tool_call>\s*([^\s<]+)(.*?)</tool_call>",
        r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>",
    ),
    "[TOOL_CALLS] with a list": _listed,
    "[TOOL_CALLS]NAME[ARGS]": partial(
        _named,
        r"\[TOOL_CALLS\]\s*([^\s\[]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(\{.*?\})\s*(?=\[TOOL_CALLS\]|</s>|$)",
    ),
    "to=functions.NAME": partial(_named, r"to=functions\.([\w.-]+).*?<\|message\|>(.*?)<\|call\|>"),
    "<|tool_call>call:NAME": _without_quotes,
    "<｜tool▁sep｜>NAME": partial(_named, r"<｜tool▁sep｜>([^\n<]+)\n```json\n(.*?)\n```"),
    "JSON": _bare,
}
"""Reader of each known format: those of Hermes and Qwen, Qwen3-Coder, GLM, Mistral (two), GPT-OSS, Gemma 4, DeepSeek,
Llama."""


def readers_of(tokenizer: Any) -> dict[str, Reader]:
    """Return the readers of formats by name, in the order in which to try them.

    A tokenizer with a response template or schema, which transformers reads answers by, has one more.
    """
    has_own = any(
        getattr(tokenizer, name, None) for name in ("response_template", "response_schema")
    )
    if not has_own:
        return _READERS

    def read(text: str) -> list[Call]:
        try:
            message = tokenizer.parse_response(text)
        except Exception as error:  # a template can raise anything
            raise ValueError("the answer cannot be parsed") from error
        return [Call.of(call) for call in message.get("tool_calls") or []]

    return {"the tokenizer's response template": read, **_READERS}


def format_of(tokenizer: Any, text: str, names: list[str]) -> str | None:
    """Return the name of the format in which *text* has calls of tools with these *names*; None if there is none."""
    for name, read in readers_of(tokenizer).items():
        if [call.name for call in read_calls(read, text)] == names:
            return name
    return None
