"""``--show-samples`` on messages of other programs: what is read, what is an error, and what is counted."""

import json
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.cli.train import main
from tests.support.models.stand_ins import LLAMA_CHAT, write_model

Capture = pytest.CaptureFixture[str]
CHATML = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
CALLING = CHATML.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}")
ASKED = {"role": "user", "content": "Question"}
RECIPE = """\
model: {{from_pretrained: {model}}}
dataset: {{_target_: automodel_ckpt.data.chat.messages, path: {data}, seq_length: 128}}
dataloader: {{shuffle: false}}
checkpoint: {{checkpoint_dir: {run}}}
"""
MARKED = (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path, {"model_type": "llama"}, LLAMA_CHAT)
    return path


def shown(
    model: Path, tmp_path: Path, rows: list[dict[str, Any]], *words: str, template: str = CHATML
) -> int:
    """Run ``--show-samples`` on *rows*."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t.jinja").write_text(template)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        RECIPE.format(model=model, data=tmp_path / "rows.jsonl", run=tmp_path / "run")
    )
    words = (f"--dataset.chat_template={tmp_path}/t.jinja", *words)
    return main(["--show-samples", "9", str(recipe), *words])


def talk(*turns: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"messages": list(turns)}]


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "user", "text": "Question"}, {"role": "assistant", "text": "Answer"}],
        [{"role": "user", "value": "Question"}, {"role": "assistant", "value": "Answer"}],
        [{"from": "human", "value": "Question"}, {"from": "gpt", "text": "Answer"}],
        [{"role": "human", "content": "Question"}, {"role": "gpt", "content": "Answer"}],
        [ASKED, {"role": "assistant", "content": None, "text": "Answer"}],
    ],
)
def test_common_spellings_are_read(
    model: Path, tmp_path: Path, capsys: Capture, turns: list[dict[str, Any]]
) -> None:
    assert shown(model, tmp_path, talk(*turns)) == 0
    text = capsys.readouterr().out
    assert "user: Question" in text
    assert ">>>Answer" in text


@pytest.mark.parametrize("key", ["train", "training", "loss", "trainable", "weight"])
@pytest.mark.parametrize("value", [False, 0])
def test_turns_that_other_programs_exclude_have_no_labels(
    model: Path, tmp_path: Path, capsys: Capture, key: str, value: object
) -> None:
    first = {"role": "assistant", "content": "Wrong", key: value}
    rows = talk(ASKED, first, ASKED, {"role": "assistant", "content": "Right"})
    assert shown(model, tmp_path, rows) == 0
    text = capsys.readouterr().out
    assert ">>>Right" in text
    assert "Wrong" in text
    assert ">>>Wrong" not in text


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ({"content": "a", "train_detail": []}, "train_detail"),
        ({"content": "a", "mask": True}, "weight 0"),
        ({"content": "a", "loss": 0.5}, "loss: 0.5"),
        ({"content": "a", "train": True, "weight": 0}, "train: True"),
    ],
)
def test_unclear_messages_are_errors(
    model: Path, tmp_path: Path, capsys: Capture, turn: dict[str, Any], expected: str
) -> None:
    rows = talk(ASKED, {"role": "assistant"} | turn, ASKED, {"role": "assistant", "content": "b"})
    assert shown(model, tmp_path, rows) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert "rows.jsonl:1" in error


@pytest.mark.parametrize(
    "turn",
    [
        {"reasoning_content": "Thought"},
        {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"timestamp": 3},
        {"text": "Other"},
        {"role": "critic"},
        {"role": "Assistant"},
    ],
)
def test_what_a_template_leaves_out_or_does_not_know_is_counted(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, turn: dict[str, Any]
) -> None:
    answer = {"role": "assistant", "content": "Beside"}
    end = {"role": "assistant", "content": "End"}
    rows = [*talk(ASKED, answer | turn, ASKED, end), *talk(ASKED, answer)]
    assert shown(model, tmp_path, rows, template=CALLING) == 0
    (key, value), *_ = turn.items()
    (message,) = [text for text in caplog.messages if "1 sample has" in text]
    assert any(word in message for word in (key, repr(value), "text", "tool"))


def test_rows_with_tools_use_the_named_template_for_tools(
    model: Path, tmp_path: Path, capsys: Capture
) -> None:
    named = tmp_path / "named"
    named.mkdir()
    for file in model.iterdir():
        (named / file.name).write_bytes(file.read_bytes())
    for file in named.glob("*.jinja"):
        file.unlink()
    config = json.loads((named / "tokenizer_config.json").read_text())
    with_tools = "TOOLS {{ tools | tojson }} " + CHATML
    config["chat_template"] = [
        {"name": "default", "template": CHATML},
        {"name": "tool_use", "template": with_tools},
    ]
    (named / "tokenizer_config.json").write_text(json.dumps(config))
    answer = {"role": "assistant", "content": "Answer"}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    rows = [{"messages": [ASKED, answer], "tools": [tool]}, {"messages": [ASKED, answer]}]
    assert shown(named, tmp_path, rows, "--dataset.chat_template=original") == 0
    assert capsys.readouterr().out.count("TOOLS ") == 1


def test_special_tokens_in_the_text_of_users_are_counted(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    typed = {"role": "user", "content": "What does </s> mean?"}
    rows = talk(typed, {"role": "assistant", "content": "The end"})
    expected = "control token"
    for template in (CHATML, CHATML.replace("{{ m.content }}", MARKED)):
        caplog.clear()
        assert shown(model, tmp_path, rows, template=template) == 0
        assert expected in caplog.text


@pytest.mark.parametrize(
    ("recipe", "builder", "row"),
    [
        ("sequence_classification", "classification.texts", {"text": "TEXT", "label": "a"}),
        ("embedding", "text_pairs.text_pairs", {"query": "TEXT", "positive": "b"}),
        ("reranker", "text_pairs.text_pairs", {"query": "q", "positive": "TEXT", "negative": "n"}),
    ],
)
def test_truncation_right_keeps_the_beginning_whatever_side_the_tokenizer_truncates(
    model: Path, tmp_path: Path, capsys: Capture, recipe: str, builder: str, row: dict[str, str]
) -> None:
    left = tmp_path / "left"
    left.mkdir()
    for file in model.iterdir():
        (left / file.name).write_bytes(file.read_bytes())
    config = json.loads((left / "tokenizer_config.json").read_text())
    (left / "tokenizer_config.json").write_text(json.dumps(config | {"truncation_side": "left"}))
    text = "first " + "word " * 50 + "last"
    rows = [json.dumps({key: value.replace("TEXT", text) for key, value in row.items()})] * 2
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    words = [
        f"--recipe={recipe}",
        f"--model.from_pretrained={left}",
        f"--dataset={{_target_: automodel_ckpt.data.{builder}, seq_length: 16, truncation: right}}",
        f"--dataset.path={tmp_path}/rows.jsonl",
        *(["--classification.labels=[a, b]"] if "class" in recipe else []),
    ]
    (tmp_path / "recipe.yaml").write_text(f"checkpoint: {{checkpoint_dir: {tmp_path}/run}}\n")
    assert main(["--show-samples", "1", str(tmp_path / "recipe.yaml"), *words]) == 0
    shown = capsys.readouterr().out
    assert "first" in shown
    assert "last" not in shown
