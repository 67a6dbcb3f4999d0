"""SQuAD and HellaSwag, from small files in the layout of the real ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.data.hellaswag import hellaswag
from automodel_ckpt.data.squad import squad
from automodel_ckpt.errors import RecipeError

SQUAD = {
    "id": "5733be284776f41900661182",
    "title": "University_of_Notre_Dame",
    "context": "The school has a Catholic character. Atop the main building is a golden statue. ",
    "question": "What is atop the main building?",
    "answers": {"text": ["a golden statue", "statue"], "answer_start": [61, 70]},
}
HELLASWAG = {
    "ind": 4,
    "activity_label": "Removing ice from car",
    "ctx_a": "Then, the man writes over the snow.",
    "ctx_b": "then",
    "ctx": "Then, the man writes over the snow. then",
    "endings": [", he waits.", ", he sings.", ", he scrapes the ice.", ", he sleeps."],
    "source_id": "activitynet~v_-1IBHYS3L-Y",
    "split": "train",
    "split_type": "indomain",
    "label": "2",
}


def write(path: Path, *rows: Any) -> str:
    if path.suffix == ".parquet":
        import pandas

        pandas.DataFrame(list(rows)).to_parquet(path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def parts(tokenizer: Any, sample: dict[str, list[int]]) -> tuple[str, str]:
    masked = sample["labels"].count(-100)
    return tokenizer.decode(sample["input_ids"][:masked]), tokenizer.decode(
        sample["labels"][masked:]
    )


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_squad_asks_about_the_paragraph_and_learns_the_first_answer(
    tokenizer: Any, tmp_path: Path, kind: str
) -> None:
    prompt, completion = parts(
        tokenizer, squad(tokenizer, write(tmp_path / f"squad.{kind}", SQUAD))[0]
    )
    assert prompt == f"Context: {SQUAD['context'].strip()}\nQuestion: {SQUAD['question']}\nAnswer:"
    assert completion == " a golden statue</s>"


def test_a_question_without_answer_needs_one_from_the_recipe(
    tokenizer: Any, tmp_path: Path
) -> None:
    path = write(
        tmp_path / "squad.jsonl", SQUAD, SQUAD | {"answers": {"text": [], "answer_start": []}}
    )
    with pytest.raises(RecipeError, match=r"no answer in SQuAD's format\n.*squad\.jsonl:2"):
        squad(tokenizer, path)
    assert parts(tokenizer, squad(tokenizer, path, no_answer="unknown")[1])[1] == " unknown</s>"


def test_answers_of_another_shape_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no answer in SQuAD's format"):
        squad(tokenizer, write(tmp_path / "squad.jsonl", SQUAD | {"answers": ["a golden statue"]}))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("label", ["2", 2])
def test_hellaswag_learns_the_right_ending(
    tokenizer: Any, tmp_path: Path, kind: str, label: Any
) -> None:
    path = write(tmp_path / f"hellaswag.{kind}", HELLASWAG | {"label": label})
    assert parts(tokenizer, hellaswag(tokenizer, path)[0]) == (
        HELLASWAG["ctx"],
        " , he scrapes the ice.</s>",
    )


@pytest.mark.parametrize("label", ["", "4", "-1", None, 0])
def test_a_row_without_a_right_ending_is_refused(
    tokenizer: Any, tmp_path: Path, label: Any
) -> None:
    row = HELLASWAG | {"label": label, "endings": ["", "b", "c", "d"]}
    path = write(tmp_path / "hellaswag.jsonl", HELLASWAG, row)
    with pytest.raises(RecipeError, match=r"no valid label\n.*hellaswag\.jsonl:2"):
        hellaswag(tokenizer, path)
