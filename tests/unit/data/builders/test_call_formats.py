"""Tool calls in generated text: the formats of chat templates, and which calls are equal."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from automodel_ckpt.data.conversations.call_formats import Call, format_of, read_calls, readers_of
from automodel_ckpt.train.measure.tool_calls import compared
from tests.unit.data.builders.test_training_templates import assistant, shipped, user

PLAIN = SimpleNamespace()
"""A tokenizer without a response template."""
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2]}}'
LLAMA = '{"name": "add", "parameters": {"b": [2], "a": 1.0}}'
TEXTS = [
    ("JSON in <tool_call>", f"I add.\n<tool_call>\n{ADD}\n</tool_call><|im_end|>\n"),
    ("[TOOL_CALLS] with a list", f'[TOOL_CALLS] [{ADD[:-1]}, "id": "123456789"}}]</s>'),
    ("[TOOL_CALLS]NAME[ARGS]", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2]}</s>'),
    ("[TOOL_CALLS]NAME[ARGS]", '[TOOL_CALLS]add[CALL_ID]x1[ARGS]{"a": 1, "b": [2]}'),
    ("JSON", f"{LLAMA}<|eot_id|>"),
    ("<|tool_call>call:NAME", "<|tool_call>call:add{a:1,b:[2]}<tool_call|><|tool_response>"),
    ("JSON", f"<|python_tag|>{LLAMA}"),
    ("JSON", f"[{ADD}]"),
    ("JSON", f"Here it is:\n```json\n{ADD}\n```\n"),
    ("JSON", f'{{"tool_calls": [{{"type": "function", "function": {ADD}}}]}}'),
    ("JSON", json.dumps({"name": "add", "arguments": '{"a": 1, "b": [2]}'})),
]


@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_each_format_is_found_and_read(name: str, text: str) -> None:
    assert format_of(PLAIN, text, ["add"]) == name
    assert read_calls(readers_of(PLAIN)[name], text) == [Call.of(json.loads(ADD))]
    assert read_calls(readers_of(PLAIN)[name], text[: text.rindex("2")]) == []


@pytest.mark.parametrize(
    ("model", "name", "values"),
    [
        ("Qwen3", "JSON in <tool_call>", {"a": 1, "b": [2]}),
        ("Qwen3.5", "<function=NAME>", {"a": "1", "b": "[2]"}),
        ("Nemotron 3", "<function=NAME>", {"a": "1", "b": "[2]"}),
        ("GLM-4.5", "<arg_key>", {"a": "1", "b": "[2]"}),
        ("GPT-OSS", "to=functions.NAME", {"a": 1, "b": [2]}),
        ("Gemma 4", "<|tool_call>call:NAME", {"a": 1, "b": [2]}),
        ("DeepSeek-V3", "<｜tool▁sep｜>NAME", {"a": 1, "b": [2]}),
    ],
)
def test_what_the_templates_of_known_models_write_is_read(
    model: str, name: str, values: dict[str, Any]
) -> None:
    # GPT-OSS has one call per message.
    calls = [{"a": 1, "b": [2]}] if model == "GPT-OSS" else [{"a": 1, "b": [2]}, {}]
    rendered = answer(model, [user("1 + 2?"), assistant("", *calls)])
    assert format_of(PLAIN, rendered, ["add"] * len(calls)) == name
    expected = [Call.of({"name": "add", "arguments": each}) for each in (values, {})][: len(calls)]
    assert read_calls(readers_of(PLAIN)[name], rendered) == expected


def answer(model: str, talk: list[dict[str, Any]]) -> str:
    render: Any = render_jinja_template
    texts, _ = render(conversations=[talk], chat_template=shipped(model), date_string="2026-01-02")
    return str(texts[0]).partition("1 + 2?")[2]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The sum is 3.",
        "<tool_call>\nadd(1, 2)\n</tool_call>",
        f"<tool_call>{ADD}</tool_call><tool_call>{{</tool_call>",
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '[TOOL_CALLS] {"a": 1}',
        "[TOOL_CALLS] [1]",
        "[" * 100_000,
        '{"name": "Ada", "age": 36} [1, 2]',
    ],
)
def test_a_text_without_readable_calls_has_none(text: str) -> None:
    for read in readers_of(PLAIN).values():
        assert read_calls(read, text) == [] or text.startswith(f"<tool_call>{ADD}")
    assert read_calls(readers_of(PLAIN)["JSON in <tool_call>"], text) == []


def test_arguments_are_compared_as_json_values() -> None:
    def call(arguments: str, name: str = "f") -> Call:
        return Call.of({"name": name, "arguments": arguments})

    assert call('{"a": 1, "b": {"c": [1.0, null]}}') == call('{"b": {"c": [1, null]}, "a": 1.0}')
    for other in ('{"a": true}', '{"a": "1"}', '{"a": 1.5}', '{"a": [1]}', '{"A": 1}', "{}"):
        assert call(other) != call('{"a": 1}')
    first, second = call('{"a": 1}'), call('{"a": 2}', "g")
    assert compared([second, first], [first, second]) == dict.fromkeys(
        ("exact_match", "name_match", "parsed"), True
    )
    other = call('{"a": 3}', "g")
    assert list(compared([first, other], [first, second]).values()) == [False, True, True]
    assert list(compared([first], [first, second]).values()) == [False, False, True]
    assert list(compared([], [first]).values()) == [False, False, False]


def test_texts_of_gemma_may_contain_what_looks_like_keys() -> None:
    text = '<|tool_call>call:f{a:<|"|>{x:1,y:"2"}<|"|>,b:{c:[<|"|>d:<|"|>,true]}}<tool_call|>'
    expected = Call.of({"name": "f", "arguments": {"a": '{x:1,y:"2"}', "b": {"c": ["d:", True]}}})
    assert read_calls(readers_of(PLAIN)["<|tool_call>call:NAME"], text) == [expected]


def test_the_response_template_of_a_tokenizer_comes_first() -> None:
    def parse_response(text: str) -> dict[str, Any]:
        if "<call>" not in text:
            raise KeyError(text)
        function = {"name": "add", "arguments": {"a": 1, "b": [2]}}
        return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}

    tokenizer = SimpleNamespace(response_template={}, parse_response=parse_response)
    assert "the tokenizer's response template" not in readers_of(tokenizer)
    tokenizer.response_template = {"fields": {}}
    assert format_of(tokenizer, f"<call>{ADD}", ["add"]) == "the tokenizer's response template"
    # What it does not read, a known format may.
    assert format_of(tokenizer, ADD, ["add"]) == "JSON"
    assert format_of(tokenizer, ADD, ["subtract"]) is None
