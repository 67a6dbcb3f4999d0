"""Prompts and completions rendered by a chat template, and random tokens."""

from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.data.squad import squad
from automodel_ckpt.data.text import prompt_completion
from automodel_ckpt.errors import RecipeError
from tests.unit.data.toys import write

TEMPLATE = """{%- for m in messages %}<s>{{ m.role }}
{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant
{% endif %}"""
ROW = {"task": "Add.", "inputs": "1 2", "targets": "3"}
SQUAD = {"context": " A cat. ", "question": "Who?", "answers": {"text": ["cat"]}}
AUTOMODEL = "Context: {{ context }} Question: {{ question }} Answer: "


def texts(tokenizer: Any, sample: dict[str, list[int]]) -> tuple[str, str]:
    """The whole text of a sample, and the text with labels."""
    labels = [label for label in sample["labels"] if label != -100]
    return tokenizer.decode(sample["input_ids"]), tokenizer.decode(labels)


def test_texts_are_rendered_as_messages(tokenizer: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"prompt_field": "inputs", "completion_field": "targets"}
    path = write(tmp_path, ROW)
    sample = prompt_completion(
        tokenizer, path, as_chat=True, chat_template=TEMPLATE, system_field="task", **options
    )[0]
    whole = "<s>system\nAdd.</s><s>user\n1 2</s><s>assistant\n3</s>"
    assert texts(tokenizer, sample) == (whole, "3</s>")
    # The tokenizer has no chat template.
    plain = prompt_completion(tokenizer, path, as_chat="auto", **options)[0]
    assert texts(tokenizer, plain) == ("1 23</s>", "3</s>")
    assert plain == prompt_completion(tokenizer, path, **options)[0]
    everything = prompt_completion(tokenizer, path, learn="all", **options)[0]
    assert everything["labels"] == everything["input_ids"] == plain["input_ids"]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"system_field": "task"}, "prompts are not rendered as messages"),
        ({"system_field": "task", "as_chat": "auto"}, "the tokenizer has no chat template"),
        ({"as_chat": True}, "the tokenizer has no chat template"),
        ({"template_kwargs": {"a": 1}}, "prompts and completions are plain text"),
    ],
)
def test_settings_of_messages_need_a_template(
    tokenizer: Any, tmp_path: Path, options: dict[str, Any], what: str
) -> None:
    fields = {"prompt_field": "inputs", "completion_field": "targets"}
    with pytest.raises(RecipeError, match=what):
        prompt_completion(tokenizer, write(tmp_path, ROW), **fields, **options)


def test_questions_of_squad_have_a_prompt_of_choice(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, SQUAD)
    default = squad(tokenizer, path)[0]
    assert texts(tokenizer, default) == (
        "Context: A cat.\nQuestion: Who?\nAnswer: cat</s>",
        " cat</s>",
    )
    given = squad(tokenizer, path, prompt=AUTOMODEL, as_chat="auto")[0]
    prompt = "Context:  A cat.  Question: Who? Answer: "
    assert texts(tokenizer, given) == (f"{prompt}cat</s>", "cat</s>")
    chat = squad(tokenizer, path, prompt=AUTOMODEL, as_chat="auto", chat_template=TEMPLATE)[0]
    assert texts(tokenizer, chat) == (f"<s>user\n{prompt}</s><s>assistant\ncat</s>", "cat</s>")
