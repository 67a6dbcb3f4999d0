import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.data.chat import messages
from automodel_ckpt.data.text import prompt_completion
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.examples.data.python_docs import train_tokenizer
from tests.unit.data.toys import labeled, write

PLAIN = """{%- if tools %}<s>tools{{ tools | tojson }}</s>
{% endif %}{%- for m in messages %}<s>{{ m.role }}
{% if m.content %}{{ m.content }}{% endif %}{% if m.tool_calls %}call {{ m.tool_calls | tojson }}{% endif %}</s>
{% endfor %}{% if add_generation_prompt %}<s>assistant
{% endif %}"""
MARKED = """{%- for m in messages %}<s>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}
{%- else %}{{ m.content }}</s>{% endif %}
{% endfor %}{% if add_generation_prompt %}<s>assistant
{% endif %}"""
ENDING = PLAIN + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
"""As Phi's: the end token stands after the conversation, not after each turn."""
REWRITING = PLAIN.replace(
    "{{ m.content }}",
    "{{ m.content | upper if m.role == 'assistant' and not loop.last else m.content }}",
)
"""As templates do that leave out the reasoning of earlier turns."""

TALK = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "2 + 2"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "because"},
]


@pytest.mark.parametrize(
    ("template", "end"), [(PLAIN, "</s>\n"), (MARKED, "</s>"), (ENDING, "</s>\n")]
)
def test_the_assistants_turns_and_their_ends_are_labeled(
    tokenizer: Any, tmp_path: Path, template: str, end: str
) -> None:
    sample = messages(tokenizer, write(tmp_path, {"messages": TALK}), chat_template=template)[0]
    whole = tokenizer.apply_chat_template(TALK, chat_template=template, tokenize=False)
    assert tokenizer.decode(sample["input_ids"]) == whole
    last = "</s>" if template == ENDING else ""
    assert labeled(tokenizer, sample) == [f"four{end}", f"because{end}{last}"]


@pytest.mark.parametrize("template", [PLAIN, MARKED, REWRITING])
def test_the_last_turn_alone_is_learnt_when_asked(
    tokenizer: Any, tmp_path: Path, template: str
) -> None:
    path = write(tmp_path, {"messages": TALK})
    sample = messages(tokenizer, path, chat_template=template, learn="last")[0]
    assert [text.strip() for text in labeled(tokenizer, sample)] == ["because</s>"]


def test_an_empty_last_turn_is_not_the_last_one_to_learn(tokenizer: Any, tmp_path: Path) -> None:
    template = MARKED.replace("</s>", "")
    path = write(tmp_path, {"messages": [*TALK, {"role": "assistant", "content": ""}]})
    sample = messages(tokenizer, path, chat_template=template, learn="last")[0]
    assert [text.strip() for text in labeled(tokenizer, sample)] == ["because"]


def test_a_token_that_grows_over_the_border_is_the_assistants(
    tokenizer: Any, tmp_path: Path
) -> None:
    template = """{% for m in messages %}{{ 'h' if m.role == 'assistant' else '<s>' }}{{ m.content }}</s>{% endfor %}
{%- if add_generation_prompt %}h{% endif %}"""
    assert len(tokenizer("he", add_special_tokens=False)["input_ids"]) == 1
    talk = [TALK[1], {"role": "assistant", "content": "e four"}]
    sample = messages(tokenizer, write(tmp_path, {"messages": talk}), chat_template=template)[0]
    assert labeled(tokenizer, sample) == ["he four</s>"]


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_reason(
    tokenizer: Any, tmp_path: Path
) -> None:
    path = write(tmp_path, {"messages": TALK[1:3]}, {"messages": TALK})
    with pytest.raises(
        RecipeError, match=r"(?s)first 3 messages differently.*.*:2.*'four.*'FOUR.*last"
    ):
        messages(tokenizer, path, chat_template=REWRITING)


FORGETFUL = """{%- for m in messages %}{% if m.role == 'assistant' %}<s>assistant
{{ m.content.split('</think>')[-1].strip() }}{% for c in m.tool_calls or [] %}call {{ c | tojson }}{% endfor %}</s>
{% else %}<s>{{ m.role }}
{{ m.content }}</s>
{% endif %}{% endfor %}{% if add_generation_prompt %}<s>assistant
<think>
{% endif %}"""
"""As DeepSeek-R1-Distill's and Nemotron's: it drops thinking, and prompts with the beginning of it."""
CALL = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize("learn", ["all", "last"])
def test_a_template_that_drops_thinking_is_trained_on_as_it_writes_the_conversation(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, learn: Any
) -> None:
    talk = [
        TALK[1],
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nfour"},
        TALK[3],
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "tool_call_id": "call00000"},
        TALK[4],
    ]
    path = write(tmp_path, {"messages": talk})
    sample = messages(tokenizer, path, chat_template=FORGETFUL, learn=learn)[0]
    expected = ["four</s>\n", f"call {json.dumps(CALL)}</s>\n", "because</s>\n"]
    assert labeled(tokenizer, sample) == (expected if learn == "all" else expected[-1:])
    assert "1 sample has text or reasoning that the chat template does not write" in caplog.text
    assert "1 sample has assistant turns that the chat template writes in another" in caplog.text


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_conversation_may_begin_with_the_assistant(
    tokenizer: Any, tmp_path: Path, template: str
) -> None:
    path = write(tmp_path, {"messages": TALK[2:]})
    sample = messages(tokenizer, path, chat_template=template)[0]
    texts = [text.strip() for text in labeled(tokenizer, sample)]
    assert texts == ["four</s>", "because</s>"]


@pytest.mark.parametrize(
    ("talk", "template", "note"),
    [
        ([TALK[1], TALK[2] | {"mood": 1}], PLAIN, "messages with the key 'mood'"),
        ([TALK[1], {"role": "assistant", "content": "a</s>b"}], MARKED, "special tokens in"),
        (
            TALK[1:3],
            MARKED.replace("</s>{% endgeneration %}", "{% endgeneration %}</s>"),
            "no label on the end of the assistant's turn",
        ),
        (TALK, PLAIN, None),
        (TALK, MARKED, None),
    ],
)
def test_what_a_user_should_know_about_conversations_is_counted(
    tokenizer: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    talk: Any,
    template: str,
    note: str | None,
) -> None:
    path = write(tmp_path, {"messages": talk}, {"messages": talk})
    for _ in range(2):  # made, and read from the cache
        caplog.clear()
        messages(tokenizer, path, chat_template=template)
        warnings = [
            record.getMessage() for record in caplog.records if record.levelname == "WARNING"
        ]
        assert len(warnings) == (note is not None), warnings
        if note is not None:
            assert f"rows.jsonl: 2 samples have {note}" in warnings[0]


def test_tools_and_calls_reach_the_template_without_what_the_table_added(
    tokenizer: Any, tmp_path: Path
) -> None:
    def tool(name: str, **properties: Any) -> dict[str, Any]:
        parameters = {"type": "object", "properties": properties}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    talk = [
        TALK[1],
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        TALK[2],
    ]
    rows = [
        {"messages": talk, "tools": [tool("f", a={"type": "integer"})]},
        {"messages": TALK, "tools": [tool("g", b={"type": "string"})]},
        {"messages": TALK},
    ]
    dataset = messages(tokenizer, write(tmp_path, *rows), chat_template=PLAIN)
    for row, content in enumerate(rows):
        expected = tokenizer.apply_chat_template(
            content["messages"], tools=content.get("tools"), chat_template=PLAIN, tokenize=False
        )
        assert tokenizer.decode(dataset[row]["input_ids"]) == expected
    assert [text.split()[0] for text in labeled(tokenizer, dataset[0])] == ["call", "four</s>"]


def test_the_template_may_be_a_file_or_the_tokenizers_own(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, {"messages": TALK})
    (tmp_path / "template.jinja").write_text(PLAIN)
    with pytest.raises(RecipeError, match="the tokenizer has no chat template"):
        messages(tokenizer, path)
    with pytest.raises(RecipeError, match=r"none\.jinja"):
        messages(tokenizer, path, chat_template=str(tmp_path / "none.jinja"))
    own = train_tokenizer(400)
    own.chat_template = PLAIN
    assert (
        messages(own, path)[0]
        == messages(tokenizer, path, chat_template=str(tmp_path / "template.jinja"))[0]
    )


def test_long_conversations_are_refused_cut_or_left_out_with_counts(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    late = [{"role": "user", "content": "x " * 60}, TALK[2]]
    path = write(tmp_path, {"messages": TALK[1:3]}, {"messages": TALK * 3}, {"messages": late})
    with pytest.raises(RecipeError, match=r"rows\.jsonl:2"):
        messages(tokenizer, path, chat_template=PLAIN, seq_length=60)
    dataset = messages(tokenizer, path, chat_template=PLAIN, seq_length=60, truncation="right")
    assert [len(dataset[row]["input_ids"]) for row in range(len(dataset))][1:] == [60]
    assert "1 of 3 samples truncated to seq_length 60" in caplog.text


PARTS = PLAIN.replace(
    "{{ m.content }}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}({{ p.text }}){% endfor %}"
    "{% endif %}",
)
IN_PARTS = [
    {"role": turn["role"], "content": [{"type": "text", "text": turn["content"]}]} for turn in TALK
]


@pytest.mark.parametrize(
    ("template", "answers"),
    [(PLAIN, ["four</s>\n", "because</s>\n"]), (PARTS, ["(four)</s>\n", "(because)</s>\n"])],
)
def test_a_content_in_parts_is_written_as_text(
    tokenizer: Any, tmp_path: Path, template: str, answers: list[str]
) -> None:
    path = write(tmp_path, {"messages": json.dumps(IN_PARTS)})
    assert labeled(tokenizer, messages(tokenizer, path, chat_template=template)[0]) == answers


def test_a_template_that_leaves_out_calls_of_tools_is_refused(
    tokenizer: Any, tmp_path: Path
) -> None:
    call = {"type": "function", "function": {"name": "add_up", "arguments": {}}}
    path = write(
        tmp_path,
        {"messages": [TALK[1], {"role": "assistant", "content": "", "tool_calls": [call]}]},
    )
    assert "add_up" in labeled(tokenizer, messages(tokenizer, path, chat_template=PLAIN)[0])[0]
    with pytest.raises(RecipeError, match=r"omits the tool calls[\s\S]*add_up"):
        messages(tokenizer, path, chat_template=MARKED)
    said = {
        "role": "assistant",
        "content": "",
        "function_call": {"name": "user", "arguments": "{}"},
    }
    with pytest.raises(RecipeError, match=r"omits the tool calls[\s\S]*value:  user"):
        messages(tokenizer, write(tmp_path, {"messages": [TALK[1], said]}), chat_template=PLAIN)


def test_a_template_that_leaves_out_the_tools_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add_up", "parameters": {}}}
    path = write(tmp_path, {"messages": TALK, "tools": [tool]})
    with pytest.raises(RecipeError, match=r"omits the tools[\s\S]*jsonl:1[\s\S]*add_up"):
        messages(tokenizer, path, chat_template=MARKED)
    assert messages(tokenizer, path, chat_template=MARKED, tools_field="none")[0]


def test_a_template_that_writes_the_date_is_told_of(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = "{{ date_string if date_string is defined else strftime_now('%Y') }}" + PLAIN
    path = write(tmp_path, {"messages": TALK})
    messages(tokenizer, path, chat_template=template, template_kwargs={"date_string": "1 May"})
    assert "writes today's date" not in caplog.text
    messages(tokenizer, path, chat_template=template)
    assert "writes today's date" in caplog.text


def in_parts(*parts: dict[str, Any]) -> dict[str, Any]:
    """A message of the user with these parts."""
    return {"role": "user", "content": list(parts)}


def weighed(*weights: Any) -> list[dict[str, Any]]:
    """TALK, its messages with these weights; None for none."""
    return [
        turn if weight is None else turn | {"weight": weight}
        for turn, weight in zip(TALK, weights, strict=True)
    ]


ANSWER = TALK[2]
REFUSED: list[tuple[Any, str, str]] = [
    ("hello", PLAIN, "this is not JSON"),
    ([], PLAIN, "this is not a conversation"),
    ([{"content": "hello"}], PLAIN, "this is not a conversation"),
    ([TALK[1], {"role": "assistant", "content": None}], PLAIN, "a message has no content"),
    ([{"role": "user", "name": "a", "weight": 0}, ANSWER], PLAIN, "a message has no content"),
    ([{"role": "user", "content": 4}, ANSWER], PLAIN, "neither text nor a list of parts"),
    ([TALK[1], ANSWER | {"train_detail": [{"train": True}]}], PLAIN, "differs between programs"),
    ([TALK[1], ANSWER | {"mask": True}], PLAIN, "differs between programs"),
    ([TALK[1], ANSWER | {"loss": "no"}], PLAIN, "neither true nor false"),
    ([TALK[1], ANSWER | {"train": True, "weight": 0}], PLAIN, "differs from its weight"),
    (weighed(None, None, 0.5, None, 1), PLAIN, "neither 0 nor 1"),
    (weighed(None, None, "0", None, None), PLAIN, "neither 0 nor 1"),
    (weighed(None, 1, None, None, 1), PLAIN, "the message is not the assistant's"),
    (weighed(None, None, 0, None, 0), PLAIN, "no assistant token to train on"),
    (TALK[:2], PLAIN, "no assistant token to train on"),
    (TALK[:2], MARKED, "no assistant token to train on"),
    ([in_parts({"type": "image", "path": "a.png"}), ANSWER], PARTS, "type that is not supported"),
    ([in_parts({"type": "image_url", "image_url": "a.png"}), ANSWER], PARTS, "not supported"),
    ([in_parts({"type": "surprise", "text": "?"}), ANSWER], PARTS, "not supported"),
    ([in_parts({"type": "text", "text": None}), ANSWER], PARTS, "has no text"),
]


@pytest.mark.parametrize(("talk", "template", "what"), REFUSED)
def test_what_cannot_be_trained_on_is_refused_with_its_line(
    tokenizer: Any, tmp_path: Path, talk: Any, template: str, what: str
) -> None:
    path = write(
        tmp_path, {"messages": TALK}, {"messages": talk if talk == "hello" else json.dumps(talk)}
    )
    with pytest.raises(RecipeError, match=rf"{what}[\s\S]*rows.jsonl:2[\s\S]*hint:"):
        messages(tokenizer, path, chat_template=template)


@pytest.mark.parametrize("template", [PLAIN, MARKED, ENDING])
def test_what_has_weight_0_is_not_learnt_and_the_weight_is_not_rendered(
    tokenizer: Any, tmp_path: Path, template: str
) -> None:
    path = write(
        tmp_path,
        {"messages": weighed(0, None, 0, None, 1)},
        {"messages": weighed(None, 0, 1.0, 0, 0)},
        {"messages": TALK},
    )
    dataset = messages(tokenizer, path, chat_template=template + "{{ messages[0].weight }}")
    runs = [
        [text.split("</s>")[0] for text in labeled(tokenizer, dataset[row])] for row in range(3)
    ]
    assert runs == [["because"], ["four"], ["four", "because"]]
    assert dataset[0]["input_ids"] == dataset[1]["input_ids"] == dataset[2]["input_ids"]
    last = messages(
        tokenizer,
        write(tmp_path, {"messages": weighed(0, 0, 1, 0, 0)}),
        chat_template=template,
        learn="last",
    )
    assert [text.split("</s>")[0] for text in labeled(tokenizer, last[0])] == ["four"]


SHAREGPT = [{"from": "human", "value": "2 + 2"}, {"from": "gpt", "value": "four", "weight": 1}]


def test_conversations_of_sharegpt_are_read(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, {"conversations": SHAREGPT})
    with pytest.raises(
        RecipeError, match=r"no field talk[\s\S]*hint: .*in the dataset section .*reference/data"
    ):
        messages(tokenizer, path, chat_template=PLAIN, messages_field="talk")
    given = messages(tokenizer, path, chat_template=PLAIN, messages_field="conversations")[0]
    assert messages(tokenizer, path, chat_template=PLAIN)[0] == given
    assert (
        given
        == messages(tokenizer, write(tmp_path, {"messages": TALK[1:3]}), chat_template=PLAIN)[0]
    )
    for message, what in (
        ({"from": "bing", "value": "x"}, "unknown speaker"),
        ({"from": "gpt"}, "no content"),
    ):
        with pytest.raises(RecipeError, match=what):
            messages(
                tokenizer, write(tmp_path, {"messages": [*SHAREGPT, message]}), chat_template=PLAIN
            )


@pytest.mark.parametrize("template", [PLAIN, MARKED, REWRITING])
def test_prompts_and_completions_may_be_lists_of_messages(
    tokenizer: Any, tmp_path: Path, template: str
) -> None:
    path = write(tmp_path, {"prompt": TALK[:4], "completion": TALK[4:]})
    sample = prompt_completion(tokenizer, path, chat_template=template)[0]
    whole = messages(
        tokenizer, write(tmp_path, {"messages": TALK}), chat_template=template, learn="last"
    )[0]
    assert sample == whole
    (row,) = prompt_completion(
        tokenizer,
        write(tmp_path, {"prompt": TALK[:4], "completion": TALK[4:]}),
        chat_template=template,
        streaming=True,
    )
    assert row.content["prompt"] == TALK[:4]


@pytest.mark.parametrize(
    ("prompt", "completion", "options", "what"),
    [
        (TALK[1:2], "four", {}, "a completion is not a list of messages"),
        ("2 + 2", TALK[2:3], {}, "a prompt or a completion is not a list of messages"),
        (TALK[1:3], TALK[4:], {}, r"continues the assistant's message[\s\S]*four"),
        (TALK[1:2], [], {}, r"no assistant token to train on[\s\S]*value:  user\n"),
        ("2 + 2", "four", {}, "a chat template is set, but prompts and completions are plain text"),
        (TALK[1:2], TALK[2:3], {"chat_template": None}, "the tokenizer has no chat template"),
    ],
)
def test_pairs_of_messages_that_do_not_fit_are_refused(
    tokenizer: Any, tmp_path: Path, prompt: Any, completion: Any, options: dict[str, Any], what: str
) -> None:
    path = write(tmp_path, {"prompt": prompt, "completion": completion})
    with pytest.raises(RecipeError, match=what):
        prompt_completion(tokenizer, path, **({"chat_template": PLAIN} | options))


def test_empty_answers_are_counted_and_null_means_absent(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = "{% for m in messages %}<s>{{ m.keys() | sort | join(',') }} {{ m.content }}</s>{% endfor %}"
    answers = [
        {"role": "assistant", "content": text, "tool_calls": None, "name": None}
        for text in ("four", " ", "")
    ]
    path = write(tmp_path, *({"messages": [TALK[1], answer]} for answer in answers))
    dataset = messages(
        tokenizer, path, chat_template=template + "{% if add_generation_prompt %}<s>{% endif %}"
    )
    assert (
        tokenizer.decode(dataset[0]["input_ids"])
        == "<s>content,role 2 + 2</s><s>content,role four</s>"
    )
    assert "2 of 3 samples have an empty completion" in caplog.text


@pytest.mark.parametrize("build", [messages, prompt_completion])
def test_text_without_a_tokenizer_is_refused_with_what_to_name(
    tmp_path: Path, build: Callable[..., object]
) -> None:
    file = tmp_path / "x.jsonl"
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    file.write_text(json.dumps({"prompt": "a", "completion": "b", "messages": turns}) + "\n")
    with pytest.raises(RecipeError, match="text data requires a tokenizer"):
        build(tokenizer=None, path=str(file), seq_length=16)
