"""The turns of held-out conversations that call tools: their prompts, expected calls, and data that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.data.chat import ConversationEncoder
from automodel_ckpt.data.conversations.call_tests import CallTestReader, CallTests
from automodel_ckpt.data.conversations.chat_template import ChatTemplate
from automodel_ckpt.data.conversations.conversation_changes import ConversationChanges
from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.errors import RecipeError
from tests.unit.data.builders.test_agent_chat import CALL, SHAREGPT, SWIFT
from tests.unit.data.toys import write

TEMPLATE = """{%- if tools %}tools{{ tools | tojson }}
{% endif %}{%- for m in messages %}[{{ m.role }}]
{{ m.content }}{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}</s>
{% endfor %}{% if add_generation_prompt %}[assistant]
{% endif %}"""
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def called(**arguments: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}


def read(
    tokenizer: Any,
    directory: Path,
    *rows: dict[str, Any],
    template: str = TEMPLATE,
    max_tokens: int | None = None,
    max_samples: int | None = None,
    limit: int | None = None,
) -> CallTests:
    chat = ChatTemplate(tokenizer, template, {}, last_only=False)
    changes = ConversationChanges(False, False, False)
    encoder = ConversationEncoder(chat, changes, "messages", "tools")
    source = Source.of(write(directory, *rows))
    return CallTestReader(tokenizer, chat, max_tokens).read(source, encoder, max_samples, limit)


def test_each_turn_with_calls_is_a_test_and_its_prompt_is_what_precedes_it(
    tokenizer: Any, tmp_path: Path
) -> None:
    ask = {"role": "user", "content": "1 + 2"}
    result = {"role": "tool", "content": "3"}
    talk = [ask, called(a=1), result, {"role": "assistant", "content": "3"}, ask, called(a=3)]
    row = {"messages": talk, "tools": json.dumps(TOOLS)}
    found = read(tokenizer, tmp_path, row)
    assert found.format == "JSON in <tool_call>"
    assert [str(call) for test in found.tests for call in test.calls] == [
        'add({"a": 1})',
        'add({"a": 3})',
    ]
    texts = [tokenizer.decode(test.prompt) for test in found.tests]
    before = f"tools{json.dumps(TOOLS)}\n[user]\n1 + 2</s>\n[assistant]\n"
    assert texts[0] == before
    assert texts[1].startswith(before + "<tool_call>")
    assert texts[1].endswith("[assistant]\n3</s>\n[user]\n1 + 2</s>\n[assistant]\n")
    end = tokenizer.eos_token_id
    assert [test.end for test in found.tests] == [end, end]
    answer = tokenizer.encode('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call></s>\n')
    assert found.tests[0].num_answer_tokens == len(answer)
    # A turn with the weight 0, and one before which there is nothing.
    unused = [called(a=1), ask, called(a=2) | {"weight": 0}, ask, called(a=3)]
    (test,) = read(tokenizer, tmp_path, {"messages": unused}).tests
    assert [str(call) for call in test.calls] == ['add({"a": 3})']


def test_the_formats_of_chat_data_are_read_and_the_limits_hold(
    tokenizer: Any, tmp_path: Path
) -> None:
    (test,) = read(tokenizer, tmp_path, {"messages": SWIFT}).tests
    assert [call.arguments for call in test.calls] == ['{"a": 1, "b": 2}', '{"a": 3, "b": 4}']
    rows = [{"conversations": SHAREGPT}] * 250
    assert len(read(tokenizer, tmp_path, *rows).tests) == 250
    assert len(read(tokenizer, tmp_path, *rows, max_samples=120, limit=200).tests) == 120
    assert len(read(tokenizer, tmp_path, *rows, limit=3).tests) == 3
    function = {"name": "add", "description": "Add.", "parameters": {"a": {"type": "int"}}}
    xlam = {"query": "1 + 2", "tools": json.dumps([function]), "answers": json.dumps([CALL, CALL])}
    (test,) = read(tokenizer, tmp_path, xlam).tests
    assert [call.name for call in test.calls] == ["add", "add"]
    assert '"type": "integer"' in tokenizer.decode(test.prompt)
    long = {"messages": [{"role": "user", "content": "word " * 90}, called(a=1)]}
    short = {"messages": [{"role": "user", "content": "word"}, called(a=1)]}
    found = read(tokenizer, tmp_path, long, short, max_tokens=60)
    assert (len(found.tests), found.num_too_long) == (1, 1)


@pytest.mark.parametrize(
    ("row", "options", "what"),
    [
        ({"messages": [SWIFT[0], SWIFT[-1]]}, {}, "no conversation has a turn in which"),
        ({"messages": SWIFT}, {"max_tokens": 2}, "all prompts are too long"),
        ({"messages": [{"role": "user"}]}, {}, r"no content\n  where:  sample 0 \(.*rows.jsonl:1"),
        (
            {"messages": SWIFT},
            {"template": TEMPLATE.replace("tool_call>", "x>").replace("| tojson", "")},
            r"that the chat template writes cannot be read[\s\S]*JSON in <tool_call>",
        ),
        (
            {"messages": SWIFT, "tools": TOOLS},
            {"template": TEMPLATE.replace("tools", "x")},
            "the chat template omits the tools",
        ),
    ],
)
def test_data_that_cannot_be_used_is_an_error(
    row: dict[str, Any], options: dict[str, Any], what: str, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=what):
        read(tokenizer, tmp_path, row, **options)


def test_an_end_is_a_special_token_that_nothing_follows(tokenizer: Any, tmp_path: Path) -> None:
    row = {"messages": SWIFT[:4]}
    for ends in ("", "</s>then", "</s></s>"):
        (test,) = read(tokenizer, tmp_path, row, template=TEMPLATE.replace("</s>", ends)).tests
        assert test.end is None
