"""Shipped training templates: the text that each model expects, and marks around what the model has to generate.

The expected texts are written here by hand from the formats of the models. ``⟦`` and ``⟧`` enclose what is marked.
"""

import hashlib
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from automodel_ckpt.data.chat import messages
from automodel_ckpt.data.conversations.chat_template import ChatTemplate
from automodel_ckpt.data.conversations.template_choice import (
    model_of,
    select_template,
    shipped_templates,
)
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.examples.data.python_docs import train_tokenizer

FIXTURE = Path(__file__).parents[3] / "fixtures" / "training_templates.json"
CASES: list[dict[str, Any]] = json.loads(FIXTURE.read_text("utf-8"))
"""The model, its conversation, and what its template writes, with ⟦ and ⟧ around what the model generates."""
BY_NAME = {f"{case['model']}-{case['case']}": case for case in CASES}


def shipped(model: str) -> str:
    """The text of the template that is shipped for a model."""
    return next(each.text for each in shipped_templates() if each.model == model)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_training_template_marks_what_the_model_has_to_generate(name: str) -> None:
    render: Any = render_jinja_template
    texts, marks = render(
        conversations=[BY_NAME[name]["talk"]],
        chat_template=shipped(BY_NAME[name]["model"]),
        return_assistant_tokens_mask=True,
        bos_token="<s>",
        date_string="2026-01-02",
    )
    text = texts[0]
    for start, end in reversed(marks[0]):
        text = f"{text[:start]}⟦{text[start:end]}⟧{text[end:]}"
    assert text.replace("⟧⟦", "").replace("⟦⟧", "") == BY_NAME[name]["expected"]


OWN = """{% for m in messages %}{{ m.role }}: {{ m.content if loop.last else m.content.split('</think>')[-1] }}</s>
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
"""A tokenizer's template that drops the thinking of earlier turns."""


@pytest.fixture
def known() -> Any:
    """A tokenizer with Qwen3's special tokens, whose template is one that a training template replaces."""
    tokenizer = train_tokenizer(400)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>", "<think>", "</think>"], special_tokens=True)
    tokenizer.chat_template = OWN + "\n"
    entry = next(each for each in shipped_templates() if each.model == "Qwen3")
    entry.sha256.append(hashlib.sha256(OWN.encode()).hexdigest())
    yield tokenizer
    entry.sha256.pop()


def test_a_known_template_is_replaced_by_its_digest_and_the_log_reports_it(
    known: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    case = BY_NAME["Qwen3-thinking"]
    path.write_text(json.dumps({"messages": case["talk"]}) + "\n")
    with caplog.at_level(logging.DEBUG):
        sample = messages(known, str(path))[0]
    assert "the training template for Qwen3, which replaces the tokenizer's" in caplog.text
    assert known.decode(sample["input_ids"]) == re.sub("[⟦⟧]", "", case["expected"])
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
    sample = ChatTemplate(tokenizer, GEMMA_4, {}, False).sample(
        BY_NAME["Qwen3-a call"]["talk"], None
    )
    runs = "".join(
        tokenizer.decode([token]) if labelled else "\0"
        for token, labelled in zip(sample.tokens, sample.labelled, strict=True)
    )
    assert [run for run in runs.split("\0") if run] == [
        "<|tool_call>add<tool_call|>",
        "It is 3.<turn|>\n",
        "!<turn|>\n",
    ]
