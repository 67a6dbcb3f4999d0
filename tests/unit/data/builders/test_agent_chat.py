"""Conversations of agents: calls and results as messages, reasoning, and conversations that are too long."""

import json
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.data.chat import messages
from automodel_ckpt.data.conversations.messages import UnusableSample, turns_of
from automodel_ckpt.data.function_calls import schemas, xlam
from automodel_ckpt.errors import RecipeError
from tests.unit.data.toys import labeled, write

TEMPLATE = """{%- if tools %}<s>tools{{ tools | tojson }}</s>{% endif %}{%- for m in messages %}<s>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}call {{ call.function | tojson }}{% endfor %}</s>
{% endfor %}{% if add_generation_prompt %}<s>assistant
{% endif %}"""
MARKED = TEMPLATE.replace(
    "{% if m.reasoning_content %}",
    "{% if m.role == 'assistant' %}{% generation %}{% if m.reasoning_content %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endgeneration %}{% else %}"
    "{{ m.content }}{% endif %}{% if false %}",
).replace("</think>{% endif %}{{ m.content }}\n", "</think>{% endif %}\n")

CALL = {"name": "add", "arguments": {"a": 1, "b": 2}}
SWIFT = [
    {"role": "user", "content": "1 + 2 and 3 + 4"},
    {"role": "assistant", "content": "let me see"},
    {"role": "tool_call", "content": json.dumps(CALL)},
    {"role": "tool_call", "content": '{"name": "add", "arguments": {"a": 3, "b": 4}}'},
    {"role": "tool_response", "content": "3"},
    {"role": "tool_response", "content": {"sum": 7}},
    {"role": "assistant", "content": "3 and 7"},
]
SHAREGPT = [
    {"from": "human", "value": "1 + 2"},
    {"from": "function_call", "value": json.dumps(CALL)},
    {"from": "observation", "value": "3"},
    {"from": "gpt", "value": "three"},
]
THINKING = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "because why", "reasoning_content": "because"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "four", "reasoning_content": "sum"},
]


def test_calls_and_results_become_messages_of_the_assistant_and_of_tools() -> None:
    turns = turns_of(SWIFT)
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "tool", "assistant"]
    calls = turns[1]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    assert [turn["tool_call_id"] for turn in turns[2:4]] == [call["id"] for call in calls]
    assert [turn["content"] for turn in turns[1:4]] == ["let me see", "3", '{"sum": 7}']


@pytest.mark.parametrize(
    ("content", "what"), [('{"arguments": {}}', "no name"), ("[1]", "no name"), (None, "no name")]
)
def test_a_call_in_another_format_is_an_error_with_the_format(content: Any, what: str) -> None:
    talk = [SWIFT[0], {"role": "tool_call", "content": content}]
    with pytest.raises(UnusableSample, match=what) as caught:
        turns_of(talk)
    assert '"arguments"' in caught.value.hint


def test_calls_have_labels_and_results_have_none(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, {"conversations": SHAREGPT, "tools": "[]"})
    sample = messages(tokenizer, path, chat_template=TEMPLATE)[0]
    call, answer = labeled(tokenizer, sample)
    assert call.startswith('call {"name": "add"') and answer.startswith("three")


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_reasoning_can_be_rendered_without_labels(
    tokenizer: Any, tmp_path: Path, template: str
) -> None:
    path = write(tmp_path, {"messages": THINKING})
    plain = messages(tokenizer, path, chat_template=template)[0]
    masked = messages(tokenizer, path, chat_template=template, mask_reasoning=True)[0]
    assert masked["input_ids"] == plain["input_ids"]
    texts = [text.split("</s>")[0] for text in labeled(tokenizer, masked)]
    assert texts == ["because why", "four"]
    last = messages(tokenizer, path, chat_template=template, mask_reasoning=True, learn="last")[0]
    assert [text.split("</s>")[0] for text in labeled(tokenizer, last)] == ["four"]


def test_earlier_reasoning_can_be_removed(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, {"messages": THINKING})
    sample = messages(tokenizer, path, chat_template=TEMPLATE, drop_earlier_reasoning=True)[0]
    text = tokenizer.decode(sample["input_ids"])
    assert "<think>because" not in text and "<think>sum</think>four" in text


def test_unanswered_messages_can_be_removed_and_conversations_skipped(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unfinished = [*THINKING, {"role": "user", "content": "three"}]
    path = write(tmp_path, {"messages": unfinished}, {"messages": THINKING[:1]})
    with pytest.raises(RecipeError, match=r"no assistant token to train on[\s\S]*rows.jsonl:2"):
        messages(tokenizer, path, chat_template=TEMPLATE)
    options: dict[str, Any] = {"end_with_answer": True, "skip_unanswered": True}
    dataset = messages(tokenizer, path, chat_template=TEMPLATE, **options)
    assert len(dataset) == 1 and "three" not in tokenizer.decode(dataset[0]["input_ids"])
    assert "rows.jsonl: 1 of 2 samples skipped" in caplog.text


def test_the_oldest_exchanges_are_removed_until_the_rest_fits(
    tokenizer: Any, tmp_path: Path
) -> None:
    system = {"role": "system", "content": "be short"}
    path = write(
        tmp_path,
        {"messages": [system, *THINKING]},
        {"messages": [system, {"role": "user", "content": "long " * 60}, THINKING[-1]]},
    )
    short = messages(
        tokenizer,
        write(tmp_path / "..", {"messages": [system, *THINKING[2:]]}),
        chat_template=TEMPLATE,
    )
    limit = len(short[0]["input_ids"])
    options: dict[str, Any] = {"chat_template": TEMPLATE, "seq_length": limit}
    with pytest.raises(RecipeError, match="2 of 2 samples"):
        messages(tokenizer, path, **options)
    fitting = messages(tokenizer, path, truncation="history", **options)
    assert len(fitting) == 1 and fitting[0] == short[0]
    whole = messages(tokenizer, path, chat_template=TEMPLATE, truncation="history")
    assert len(whole) == 2
    with pytest.raises(RecipeError, match=r"all samples of the data were skipped[\s\S]*2 samples"):
        messages(tokenizer, path, truncation="skip", **options)


XLAM = {
    "query": "1 + 2",
    "tools": json.dumps(
        [
            {
                "name": "add",
                "description": "Adds.",
                "parameters": {
                    "a": {"type": "int", "description": "first"},
                    "b": {"type": "List[int], optional", "description": "", "default": "3"},
                },
            }
        ]
    ),
    "answers": json.dumps([CALL, CALL]),
}


def test_functions_of_xlam_become_json_schema() -> None:
    (tool,) = schemas(XLAM["tools"])
    function = tool["function"]
    assert function["parameters"]["required"] == ["a"]
    assert function["parameters"]["properties"]["b"] == {
        "type": "array",
        "description": "",
        "default": "3",
    }
    assert schemas([tool]) == [tool]


def test_the_expected_calls_have_labels(tokenizer: Any, tmp_path: Path) -> None:
    sample = xlam(tokenizer, write(tmp_path, XLAM), chat_template=TEMPLATE)[0]
    (text,) = labeled(tokenizer, sample)
    assert text.count('call {"name": "add", "arguments": {"a": 1, "b": 2}}') == 2
    assert '<s>tools[{"type": "function"' in tokenizer.decode(sample["input_ids"])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"tools": "{}"}, "the functions are not a list"),
        ({"tools": '[{"parameters": {}}]'}, "a function has no name"),
        ({"tools": '[{"name": "f", "parameters": {"a": null}}]'}, "no descriptions"),
        ({"answers": "[]"}, "the calls are not a list"),
        ({"answers": "["}, "not JSON"),
    ],
)
def test_a_row_in_another_format_is_an_error_with_its_line(
    tokenizer: Any, tmp_path: Path, change: dict[str, str], what: str
) -> None:
    path = write(tmp_path, XLAM, XLAM | change)
    with pytest.raises(RecipeError, match=rf"{what}[\s\S]*rows.jsonl:2"):
        xlam(tokenizer, path, chat_template=TEMPLATE)
