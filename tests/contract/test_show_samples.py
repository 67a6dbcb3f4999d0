"""``ckpt-train --show-samples`` prints what is trained on: decoded, with the trained tokens marked, and the lengths."""

import json
from pathlib import Path

import pytest

from automodel_ckpt.cli.train import main
from automodel_ckpt.errors import EXIT_DONE, EXIT_USAGE
from tests.support.models.stand_ins import LLAMA_CHAT, write_model

Capture = pytest.CaptureFixture[str]
RECIPE = """\
model: {{from_pretrained: {model}}}
dataset: {{_target_: automodel_ckpt.data.chat.messages, path: {data}, seq_length: 128}}
dataloader: {{shuffle: false}}
checkpoint: {{checkpoint_dir: {run}}}
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shown")
    write_model(path / "chat", {"model_type": "llama"}, LLAMA_CHAT)
    rows = []
    for number in range(6):
        answer = f"It is {number + 1}." * (1 + number)
        talk = [("user", f"What is {number} plus one?\x1b[31m"), ("assistant", answer)]
        rows.append({"messages": [{"role": role, "content": text} for role, text in talk]})
    (path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = RECIPE.format(model=path / "chat", data=path / "train.jsonl", run=path / "run")
    (path / "recipe.yaml").write_text(text)
    return path


def shown(capsys: Capture, directory: Path, *words: str, num: str = "2") -> str:
    capsys.readouterr()
    assert main(["--show-samples", num, str(directory / "recipe.yaml"), *words]) == EXIT_DONE
    return capsys.readouterr().out


def test_answers_are_marked_and_nothing_is_written(capsys: Capture, directory: Path) -> None:
    text = shown(capsys, directory)
    assert "trained tokens are between >>> and <<<" in text
    assert "What is 0 plus one?" in text
    assert ">>>It is 1.<eot>" in text
    assert ">>>It is 2.It is 2.<eot>" in text
    assert "It is 3." not in text
    # A character that controls a terminal is shown as text.
    assert "\x1b" not in text
    assert "\\x1b[31m" in text
    assert not (directory / "run").exists()


def test_colors_mark_the_answers_if_there_are_colors(
    capsys: Capture, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = shown(capsys, directory)
    assert "trained tokens are green" in text
    assert "\x1b[32mIt is 1.<eot>" in text
    assert ">>>" not in text


def test_lengths_tokens_and_the_template_are_those_of_all_samples(
    capsys: Capture, directory: Path
) -> None:
    text = shown(capsys, directory, num="0")
    rows = {row.split(" ")[0]: row for row in text.splitlines() if row}
    assert "6 samples" in rows["data"]
    assert "median " in rows["lengths"]
    assert "tokens per epoch" in rows["tokens"]
    assert "0, and 0 skipped" in rows["truncated"]
    assert "the assistant's tokens are found by" in rows["template"]
    assert "sample" not in rows
    cut = shown(capsys, directory, "--dataset.truncation=skip", "--dataset.seq_length=64", num="0")
    assert "6 samples" not in cut
    assert "0, and 0 skipped" not in cut


def test_packs_are_shown_as_they_are_trained(capsys: Capture, directory: Path) -> None:
    text = shown(capsys, directory, "--packed_sequence={size: 256}", num="1")
    assert "packs " in text
    assert text.count("plus one?") > 1


def test_samples_with_cached_targets_of_a_teacher_are_summarized_like_others(
    capsys: Capture, directory: Path
) -> None:
    words = ("--recipe=distill", f"--distill.teacher.from_pretrained={directory}/chat")
    pack = "--packed_sequence={size: 256}"
    text = shown(capsys, directory, *words, pack, "--distill.top_k=4", num="0")
    assert text == shown(capsys, directory, *words, pack, num="0")
    assert "packs " in text and "6 samples" in text


def test_a_stream_is_measured_by_its_first_samples(capsys: Capture, directory: Path) -> None:
    text = shown(capsys, directory, "--dataset.streaming", "true", num="1")
    assert ">>>It is 1." in text
    assert "6 samples" in text


@pytest.mark.parametrize("num", ["x", "-1", "1.5", "99999999"])
def test_the_number_of_samples_must_be_a_number(capsys: Capture, directory: Path, num: str) -> None:
    assert main([str(directory / "recipe.yaml"), f"--show-samples={num}"]) == EXIT_USAGE
    assert "--show-samples must be a number of samples" in capsys.readouterr().err


def test_unreadable_data_is_an_error(capsys: Capture, directory: Path) -> None:
    words = ["--show-samples", "1", str(directory / "recipe.yaml"), "--dataset.path=none.jsonl"]
    assert main(words) == EXIT_USAGE
    assert "none.jsonl" in capsys.readouterr().err


def test_what_a_user_should_know_about_conversations_is_shown(
    capsys: Capture, directory: Path, tmp_path: Path
) -> None:
    answer = "{% generation %}{{ m.content }}{% endgeneration %}<eot>"
    template = "{% for m in messages %}{{ m.role }}: " + answer + "{% endfor %}"
    (tmp_path / "t.jinja").write_text(template)
    (tmp_path / "rows.jsonl").write_text(
        json.dumps(
            {
                "messages": [
                    {"role": "human", "content": "a <eot> b"},
                    {"role": "gpt", "content": "wrong", "train": False},
                    {"role": "human", "content": "again"},
                    {"role": "gpt", "content": "right", "score": 1},
                ]
            }
        )
        + "\n"
    )
    words = ["--dataset.path", f"{tmp_path}/rows.jsonl"]
    template_words = ["--dataset.chat_template", f"{tmp_path}/t.jinja"]
    recipe = str(directory / "recipe.yaml")
    assert main(["--show-samples", "1", recipe, *words, *template_words]) == EXIT_DONE
    printed = capsys.readouterr()
    assert ">>>right<<<" in printed.out
    assert ">>>wrong" not in printed.out
    for note in (
        "special tokens in the text of messages",
        "no label on the end of the assistant's turn",
        "messages with the key 'score', which is not read",
    ):
        assert f"warning    1 sample has {note}" in printed.out
