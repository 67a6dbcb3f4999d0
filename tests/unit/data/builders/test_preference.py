"""Preference data: the forms that rows have in public data sets, pairs that are skipped, margins, and micro-batches."""

from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.data.batches.loader import GlobalBatchLoader
from automodel_ckpt.data.collate import PadCollator
from automodel_ckpt.data.preference import PreferenceCollator, PreferenceDataset, pairs
from automodel_ckpt.errors import RecipeError
from tests.unit.data.toys import jsonl

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
QUESTION = {"role": "user", "content": "How many?"}


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def texts(tokenizer: Any, pair: Any) -> list[tuple[str, str]]:
    """The text of each sample of a pair, divided into what has no labels and what has."""
    found = []
    for name in ("chosen", "rejected"):
        tokens, labels = pair[name]["input_ids"], pair[name]["labels"]
        masked = labels.count(-100)
        assert labels[masked:] == tokens[masked:]
        found.append((tokenizer.decode(tokens[:masked]), tokenizer.decode(tokens[masked:])))
    return found


def test_texts_have_labels_on_both_answers(tokenizer: Any, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"})
    dataset = pairs(tokenizer, path)
    assert isinstance(dataset, PreferenceDataset)
    assert texts(tokenizer, dataset[0]) == [("2 + 2 =", " 4</s>"), ("2 + 2 =", " 5</s>")]
    assert "margin" not in dataset[0]


def test_the_common_beginning_of_texts_is_the_prompt(tokenizer: Any, tmp_path: Path) -> None:
    row = {"chosen": "Q: ok?\nA: I can", "rejected": "Q: ok?\nA: It cannot"}
    [chosen, rejected] = texts(tokenizer, pairs(tokenizer, jsonl(tmp_path / "a.jsonl", row))[0])
    assert chosen == ("Q: ok?\nA:", " I can</s>")
    assert rejected == ("Q: ok?\nA:", " It cannot</s>")


MESSAGES = {
    "explicit": {"prompt": [QUESTION], "chosen": [says("Two")], "rejected": [says("No")]},
    "implicit": {"chosen": [QUESTION, says("Two")], "rejected": [QUESTION, says("No")]},
    # As in HuggingFaceH4/ultrafeedback_binarized: the conversations contain the prompt's text.
    "prompt repeated": {
        "prompt": "How many?",
        "chosen": [QUESTION, says("Two")],
        "rejected": [QUESTION, says("No")],
    },
    "text prompt": {"prompt": "How many?", "chosen": [says("Two")], "rejected": [says("No")]},
    "text answers": {"prompt": [QUESTION], "chosen": "Two", "rejected": "No"},
    # As LLaMA-Factory's data in ShareGPT's format.
    "single": {
        "prompt": [{"from": "human", "value": "How many?"}],
        "chosen": {"from": "gpt", "value": "Two"},
        "rejected": {"from": "gpt", "value": "No"},
    },
}


@pytest.mark.parametrize("form", MESSAGES)
def test_messages_in_any_form_give_the_same_pair(tokenizer: Any, tmp_path: Path, form: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", MESSAGES[form])
    pair = pairs(tokenizer, path, chat_template=TEMPLATE)[0]
    prompt = "<user>How many?<assistant>"
    assert texts(tokenizer, pair) == [(prompt, "Two</s>"), (prompt, "No</s>")]


def test_earlier_answers_have_no_labels_and_long_ones_may_differ_in_turns(
    tokenizer: Any, tmp_path: Path
) -> None:
    shared = [QUESTION, says("One"), {"role": "user", "content": "Sure?"}]
    row = {
        "chosen": [*shared, says("Yes")],
        "rejected": [*shared, says("Yes"), QUESTION, says("No")],
    }
    path = jsonl(tmp_path / "a.jsonl", row)
    [chosen, rejected] = texts_of_labels(
        tokenizer, pairs(tokenizer, path, chat_template=TEMPLATE)[0]
    )
    assert (chosen, rejected) == ("Yes</s>", "Yes</s>No</s>")


def texts_of_labels(tokenizer: Any, pair: Any) -> list[str]:
    found = []
    for name in ("chosen", "rejected"):
        labeled = [label for label in pair[name]["labels"] if label != -100]
        found.append(tokenizer.decode(labeled))
    return found


def test_pairs_are_skipped_and_counted_as_pairs(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    rows = [
        {"prompt": "a ", "chosen": "same", "rejected": "same", "margin": 1},
        {"prompt": "a ", "chosen": "b" * 40, "rejected": "c", "margin": 2},
        {"prompt": "d" * 60, "chosen": "e", "rejected": "f" * 50, "margin": 3},
        {"prompt": "g ", "chosen": "h", "rejected": "i", "margin": 4.5},
        {"prompt": "j ", "chosen": "k", "rejected": "l"},
    ]
    path = jsonl(tmp_path / "a.jsonl", *rows)
    dataset = pairs(tokenizer, path, seq_length=16, truncation="right")
    assert len(dataset) == 3
    assert [pair.get("margin") for pair in dataset] == [2, 4.5, None]
    assert "1 of 5 pairs truncated to seq_length 16" in caplog.text
    assert len(pairs(tokenizer, path, seq_length=16, truncation="skip")) == 2
    assert len(pairs(tokenizer, path, seq_length=16, truncation="skip", max_samples=1)) == 1
    # Pairs that were prepared before come from the cache.
    again = pairs(tokenizer, path, seq_length=16, truncation="right")
    assert list(again) == list(dataset)
    with pytest.raises(RecipeError) as error:
        pairs(tokenizer, path, seq_length=16)
    [problem] = error.value.problems
    assert "a.jsonl:2 (43 tokens)" in problem.where
    assert "a.jsonl:3 (111 tokens)" in problem.where
    assert str(problem.value).startswith("2 of 5 samples")


def test_margins_are_read_from_csv_files(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,chosen,rejected,margin\na,b,c,0.5\na,b,c,\na,b,c,-2\n")
    found = pairs(tokenizer, str(path))
    assert [pair.get("margin") for pair in found] == [0.5, None, -2]


def test_a_stream_gives_the_pairs_of_the_data_set(tokenizer: Any, tmp_path: Path) -> None:
    rows = [MESSAGES["explicit"] | {"margin": 3}, MESSAGES["prompt repeated"]]
    path = jsonl(tmp_path / "a.jsonl", *rows)
    stream = pairs(tokenizer, path, chat_template=TEMPLATE, streaming=True)
    found = [stream.prepare(row) for row in stream]
    expected = pairs(tokenizer, jsonl(tmp_path / "b.jsonl", rows[0]), chat_template=TEMPLATE)[0]
    without_margin = {name: expected[name] for name in ("chosen", "rejected")}
    assert found == [expected, without_margin]


BAD = {
    "no answer": (
        {"prompt": "a", "chosen": None, "rejected": "c"},
        "field chosen of a sample is missing",
    ),
    "number": ({"prompt": [QUESTION], "chosen": 3, "rejected": "c"}, "neither text nor messages"),
    "margin": (
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "much"},
        "the margin of a preference is not a finite number",
    ),
    "fields": ({"prompt": "a", "completion": "b"}, "the data has no fields chosen, rejected"),
}


@pytest.mark.parametrize("case", BAD)
def test_unusable_rows_are_reported_with_their_location(
    tokenizer: Any, tmp_path: Path, case: str
) -> None:
    row, what = BAD[case]
    path = jsonl(tmp_path / "a.jsonl", row)
    with pytest.raises(RecipeError, match=what) as error:
        pairs(tokenizer, path, chat_template=TEMPLATE if case == "number" else None)
    assert "a.jsonl" in error.value.problems[0].where
    assert error.value.problems[0].hint


def test_micro_batches_have_pairs_in_adjacent_rows(tokenizer: Any, tmp_path: Path) -> None:
    rows = [
        {"prompt": "a ", "chosen": f"{n}", "rejected": f"{n} {n}", "margin": n} for n in range(6)
    ]
    rows[0].pop("margin")
    dataset = pairs(tokenizer, jsonl(tmp_path / "a.jsonl", *rows))
    loader = GlobalBatchLoader(
        dataset,
        global_batch_size=4,
        local_batch_size=2,
        collate_fn=PreferenceCollator(PadCollator(0)),
        shuffle=False,
    )
    first, second = list(loader)
    batch = first.micro_batches[0]
    assert batch["input_ids"].shape[0] == 4
    for number, name in enumerate(("chosen", "rejected") * 2):
        expected = dataset[number // 2][name]["input_ids"]
        kept = batch["input_ids"][number][batch["attention_mask"][number].bool()]
        assert kept.tolist() == expected
    assert batch["margin"].isnan().tolist() == [True, False]
    assert batch["margin"][1] == 1
    assert second.sample_ids == [4, 5]
    with pytest.raises(RecipeError, match="a sample lacks chosen or rejected"):
        PreferenceCollator(PadCollator(0))([{"input_ids": [1], "labels": [1]}])
