"""Shipped training templates: the text that each model expects, and marks around what the model has to generate.

The expected texts are written here by hand from the formats of the models. ``⟦`` and ``⟧`` enclose what is marked.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from automodel_ckpt.data.chat import messages
from automodel_ckpt.data.conversations import template_choice
from automodel_ckpt.data.conversations.chat_template import ChatTemplate
from automodel_ckpt.data.conversations.template_choice import model_of, select_template
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.examples.data.python_docs import train_tokenizer


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": content} | more
    functions = [
        {"id": "c", "type": "function", "function": {"name": "add", "arguments": call}}
        for call in calls
    ]
    return turn | ({"tool_calls": functions} if functions else {})


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "name": "add", "tool_call_id": "c", "content": content}


SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [SYSTEM, user("Hi"), assistant("Hello"), user("Bye"), assistant("See you")]
CALLS = [
    user("1+2?"),
    assistant("", {"a": 1, "b": [2]}),
    result("3"),
    assistant("It is 3."),
    user("Ok"),
    assistant("!"),
]


def said(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def thought(thinking: str, text: str) -> str:
    return f"<|im_start|>assistant\n⟦<think>\n{thinking}\n</think>\n\n{text}<|im_end|>\n⟧"


QWEN_TALK = (
    said("system", "Be brief.")
    + said("user", "Hi")
    + thought("", "Hello")
    + said("user", "Bye")
    + thought("", "See you")
)
QWEN_THINKING = (
    said("user", "Hi") + thought("hm", "Hello") + said("user", "Bye") + thought("ok", "See you")
)
THINKING = [
    user("Hi"),
    assistant("<think>\nhm\n</think>\n\nHello"),
    user("Bye"),
    assistant("See you", reasoning_content="ok"),
]
QWEN_RESULT = said("user", "<tool_response>\n3\n</tool_response>")
HARMONY = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: 2026-01-02\n\nReasoning: medium\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
)
HARMONY_USER = "<|start|>user<|message|>{}<|end|><|start|>assistant"

EXPECTED: list[tuple[str, str, list[dict[str, Any]], str]] = [
    ("Qwen3", "two turns", TALK, QWEN_TALK),
    ("Qwen3", "thinking", THINKING, QWEN_THINKING),
    (
        "Qwen3",
        "a call",
        CALLS,
        said("user", "1+2?")
        + thought("", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>')
        + QWEN_RESULT
        + thought("", "It is 3.")
        + said("user", "Ok")
        + thought("", "!"),
    ),
    ("Qwen3.5", "two turns", TALK, QWEN_TALK),
    ("Qwen3.5", "thinking", THINKING, QWEN_THINKING),
    (
        "Qwen3.5",
        "a call",
        CALLS,
        said("user", "1+2?")
        + thought(
            "",
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
            "<parameter=b>\n[2]\n</parameter>\n</function>\n</tool_call>",
        )
        + QWEN_RESULT
        + thought("", "It is 3.")
        + said("user", "Ok")
        + thought("", "!"),
    ),
    (
        "Qwen3.6",
        "a flag in a call",
        [user("?"), assistant(None, {"a": True})],
        said("user", "?")
        + thought(
            "",
            "<tool_call>\n<function=add>\n<parameter=a>\ntrue\n</parameter>\n</function>\n</tool_call>",
        ),
    ),
    (
        "DeepSeek-V3",
        "two turns",
        TALK,
        (
            "<s>Be brief.<｜User｜>Hi<｜Assistant｜>⟦Hello<｜end▁of▁sentence｜>⟧"
            "<｜User｜>Bye<｜Assistant｜>⟦See you<｜end▁of▁sentence｜>⟧"
        ),
    ),
    (
        "DeepSeek-V3",
        "a call",
        CALLS,
        (
            "<s><｜User｜>1+2?<｜Assistant｜>⟦<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
            '```json\n{"a": 1, "b": [2]}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>⟧'
            "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>3<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
            "⟦It is 3.<｜end▁of▁sentence｜>⟧<｜User｜>Ok<｜Assistant｜>⟦!<｜end▁of▁sentence｜>⟧"
        ),
    ),
    (
        "GPT-OSS",
        "two turns",
        TALK,
        HARMONY
        + "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|>"
        + HARMONY_USER.format("Hi")
        + "⟦<|channel|>final<|message|>Hello<|end|>⟧"
        + HARMONY_USER.format("Bye")
        + "⟦<|channel|>final<|message|>See you<|return|>⟧",
    ),
    (
        "GPT-OSS",
        "thinking",
        [user("Hi"), assistant("Hello", thinking="a"), user("Bye"), assistant("x", thinking="b")],
        HARMONY
        + HARMONY_USER.format("Hi")
        + "⟦<|channel|>final<|message|>Hello<|end|>⟧"
        + HARMONY_USER.format("Bye")
        + "⟦<|channel|>analysis<|message|>b<|end|><|start|>assistant<|channel|>final<|message|>x<|return|>⟧",
    ),
    (
        "GPT-OSS",
        "a call",
        CALLS,
        HARMONY
        + HARMONY_USER.format("1+2?")
        + '⟦ to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": [2]}<|call|>⟧'
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|><|start|>assistant'
        "⟦<|channel|>final<|message|>It is 3.<|end|>⟧"
        + HARMONY_USER.format("Ok")
        + "⟦<|channel|>final<|message|>!<|return|>⟧",
    ),
    (
        "DeepSeek-R1-Distill",
        "thinking",
        THINKING,
        (
            "<s><｜User｜>Hi<｜Assistant｜>⟦<think>\nhm\n</think>\n\nHello<｜end▁of▁sentence｜>⟧"
            "<｜User｜>Bye<｜Assistant｜>⟦<think>\nok\n</think>\n\nSee you<｜end▁of▁sentence｜>⟧"
        ),
    ),
    (
        "DiffusionGemma",
        "a call and thinking",
        [
            SYSTEM,
            *CALLS[:3],
            assistant("It is 3.", reasoning_content="done"),
            user("Ok"),
            assistant("!"),
        ],
        (
            "<s><|turn>system\nBe brief.<turn|>\n<|turn>user\n1+2?<turn|>\n<|turn>model\n"
            '⟦<|tool_call>call:add{a:1,b:[2]}<tool_call|>⟧<|tool_response>response:add{value:<|"|>3<|"|>}'
            "<tool_response|><|turn>model\n⟦It is 3.<turn|>\n⟧<|turn>user\nOk<turn|>\n<|turn>model\n⟦!<turn|>\n⟧"
        ),
    ),
    (
        "Gemma 4",
        "a call and thinking",
        [
            SYSTEM,
            *CALLS[:3],
            assistant("It is 3.", reasoning_content="done"),
            user("Ok"),
            assistant("!"),
        ],
        (
            "<s><|turn>system\nBe brief.<turn|>\n<|turn>user\n1+2?<turn|>\n<|turn>model\n"
            '⟦<|tool_call>call:add{a:1,b:[2]}<tool_call|>⟧<|tool_response>response:add{value:<|"|>3<|"|>}'
            "<tool_response|>⟦It is 3.<turn|>\n⟧<|turn>user\nOk<turn|>\n<|turn>model\n⟦!<turn|>\n⟧"
        ),
    ),
    (
        "Nemotron 3",
        "a call and thinking",
        [*CALLS[:4], user("Ok"), assistant("!", reasoning_content="hm")],
        (
            said("system", "")
            + said("user", "1+2?")
            + "<|im_start|>assistant\n⟦<think></think>\n<tool_call>\n"
            "<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2]\n</parameter>\n</function>\n"
            "</tool_call>\n<|im_end|>\n⟧"
            + said("user", "<tool_response>\n3\n</tool_response>\n")
            + "<|im_start|>assistant\n⟦<think></think>It is 3.<|im_end|>\n⟧"
            + said("user", "Ok")
            + "<|im_start|>assistant\n⟦<think>\nhm\n</think>\n!<|im_end|>\n⟧"
        ),
    ),
    (
        "Nemotron 3 Ultra",
        "thinking",
        [user("Hi"), assistant("!", reasoning_content="hm")],
        said("system", "")
        + said("user", "Hi")
        + "<|im_start|>assistant\n⟦<think>\nhm</think>!<|im_end|>\n⟧",
    ),
    (
        "GLM-4.5",
        "two turns",
        TALK,
        (
            "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHi<|assistant|>⟦\n<think></think>\nHello<|user|>⟧\nBye"
            "<|assistant|>⟦\n<think></think>\nSee you<|user|>⟧"
        ),
    ),
    (
        "GLM-4.5",
        "a call",
        CALLS,
        (
            "[gMASK]<sop><|user|>\n1+2?<|assistant|>⟦\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n"
            "<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>[2]</arg_value>\n</tool_call><|observation|>⟧"
            "\n<tool_response>\n3\n</tool_response><|assistant|>⟦\n<think></think>\nIt is 3.<|user|>⟧\nOk"
            "<|assistant|>⟦\n<think></think>\n!<|user|>⟧"
        ),
    ),
]


def shipped(model: str) -> str:
    """The text of the template that is shipped for a model."""
    entry = next(each for each in template_choice._BY_DIGEST.values() if each.model == model)
    return template_choice._text_of(entry)


@pytest.mark.parametrize(
    ("model", "case", "talk", "expected"), EXPECTED, ids=[f"{e[0]}-{e[1]}" for e in EXPECTED]
)
def test_a_training_template_marks_what_the_model_has_to_generate(
    model: str, case: str, talk: list[dict[str, Any]], expected: str
) -> None:
    render: Any = render_jinja_template
    texts, marks = render(
        conversations=[talk],
        chat_template=shipped(model),
        return_assistant_tokens_mask=True,
        bos_token="<s>",
        date_string="2026-01-02",
    )
    text = texts[0]
    for start, end in reversed(marks[0]):
        text = f"{text[:start]}⟦{text[start:end]}⟧{text[end:]}"
    assert text.replace("⟧⟦", "").replace("⟦⟧", "") == expected


OWN = """{% for m in messages %}{{ m.role }}: {{ m.content if loop.last else m.content.split('</think>')[-1] }}</s>
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
"""A tokenizer's template that drops the thinking of earlier turns."""


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tokenizer with Qwen3's special tokens, whose template is one that a training template replaces."""
    tokenizer = train_tokenizer(400)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>", "<think>", "</think>"], special_tokens=True)
    tokenizer.chat_template = OWN + "\n"
    entry = next(each for each in template_choice._BY_DIGEST.values() if each.model == "Qwen3")
    monkeypatch.setitem(template_choice._BY_DIGEST, hashlib.sha256(OWN.encode()).hexdigest(), entry)
    return tokenizer


def test_a_known_template_is_replaced_by_its_digest_and_the_log_reports_it(
    known: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": THINKING}) + "\n")
    with caplog.at_level(logging.INFO):
        sample = messages(known, str(path))[0]
    assert "the training template for Qwen3, which replaces the tokenizer's" in caplog.text
    assert known.decode(sample["input_ids"]) == QWEN_THINKING.replace("⟦", "").replace("⟧", "")
    runs = "".join(
        "\0" if label == -100 else known.decode([label]) for label in sample["labels"]
    ).split("\0")
    expected = [
        "<think>\nhm\n</think>\n\nHello<|im_end|>\n",
        "<think>\nok\n</think>\n\nSee you<|im_end|>\n",
    ]
    assert [run for run in runs if run] == expected
    assert known.chat_template == OWN + "\n", "the tokenizer, and so the export, keeps its own"
    caplog.clear()
    messages(known, str(path), chat_template="original")
    assert "1 sample has text or reasoning that the chat template does not write" in caplog.text
    assert (
        "1 sample has assistant turns that the chat template writes in another way" in caplog.text
    )


def test_only_a_known_template_has_a_training_template() -> None:
    assert select_template(OWN, None) == select_template(OWN, "original") == OWN
    with pytest.raises(RecipeError, match=r"no training template is shipped[\s\S]*Qwen3, Qwen3\.5"):
        select_template(OWN, "training")
    assert model_of(shipped("Qwen3.6")) == "Qwen3.6" and model_of(OWN) is None


GEMMA_4 = """{% set state = namespace(after=none) %}{% for m in messages %}{% if m.role == 'tool' -%}
{% set state.after = 'tool' %}<|tool_response>{{ m.content }}<tool_response|>
{%- else %}{% set state.after = none %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content or '' }}{% if m.tool_calls %}<|tool_call>{{ m.tool_calls[0].function.name }}<tool_call|>
{%- if loop.last %}<|tool_response>{% endif %}{% else %}<turn|>
{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt and not state.after %}<|turn>model
{% endif %}"""
"""As Gemma 4's: it opens the tool's result after a call, and does not prompt for the answer to it."""


def test_labels_end_with_the_assistants_own_turn() -> None:
    tokenizer = train_tokenizer(400)
    special = [
        "<|turn>",
        "<turn|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
    ]
    tokenizer.add_tokens(special, special_tokens=True)
    sample = ChatTemplate(tokenizer, GEMMA_4, {}, False).sample(CALLS, None)
    runs = "".join(
        tokenizer.decode([token]) if labelled else "\0"
        for token, labelled in zip(sample.tokens, sample.labelled, strict=True)
    )
    assert [run for run in runs.split("\0") if run] == [
        "<|tool_call>add<tool_call|>",
        "It is 3.<turn|>\n",
        "!<turn|>\n",
    ]
