"""Completions that are judged one by one: the forms of rows, pairs that are split, and mismatched completions."""

from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, Value

from automodel_ckpt.data.batches.loader import GlobalBatchLoader
from automodel_ckpt.data.collate import PadCollator
from automodel_ckpt.data.kto import JudgedDataset, KTOCollator, split_pairs
from automodel_ckpt.data.kto import judged_completions as judged
from automodel_ckpt.errors import RecipeError
from tests.unit.data.toys import jsonl

ROWS = [
    {"prompt": "2 + 2 =", "completion": " 4", "label": True},
    {"prompt": "3 + 5 is", "completion": " equal to nine", "label": False},
    {"prompt": "So", "completion": " what", "label": 1},
]


def texts(tokenizer: Any, sample: dict[str, Any]) -> tuple[str, str]:
    """The text of a sample, divided into what has no labels and what has."""
    tokens, labels = sample["input_ids"], sample["labels"]
    masked = labels.count(-100)
    assert labels[masked:] == tokens[masked:]
    return tokenizer.decode(tokens[:masked]), tokenizer.decode(tokens[masked:])


def test_a_row_is_a_prompt_with_a_judged_completion(tokenizer: Any, tmp_path: Path) -> None:
    dataset = judged(tokenizer, jsonl(tmp_path / "a.jsonl", *ROWS), seq_length=20)
    assert isinstance(dataset, JudgedDataset)
    samples = list(dataset)
    assert [texts(tokenizer, sample) for sample in samples] == [
        ("2 + 2 =", " 4</s>"),
        ("3 + 5 is", " equal to nine</s>"),
        ("So", " what</s>"),
    ]
    assert [sample["is_desirable"] for sample in samples] == [True, False, True]
    assert {sample["max_tokens"] for sample in samples} == {20}
    stream = judged(tokenizer, str(tmp_path / "a.jsonl"), seq_length=20, streaming=True)
    assert not isinstance(stream, JudgedDataset)
    assert [stream.prepare(row) for row in stream] == samples


def test_judgments_are_read_from_csv_files_and_by_the_names_of_classes(
    tokenizer: Any, tmp_path: Path
) -> None:
    words = ["true", "False", "1", "0", "1.0"]
    lines = [f"{number} =, yes,{word}" for number, word in enumerate(words)]
    (tmp_path / "a.csv").write_text("\n".join(["prompt,completion,label", *lines]))
    expected = [True, False, True, False, True]
    found = judged(tokenizer, str(tmp_path / "a.csv"))
    assert [sample["is_desirable"] for sample in found] == expected
    stream = judged(tokenizer, str(tmp_path / "a.csv"), streaming=True)
    assert [stream.prepare(row)["is_desirable"] for row in stream] == expected

    path = str(tmp_path / "a.parquet")
    for names, desirable in ((["true", "false"], [True, False]), (["good", "bad"], None)):
        kinds = {"prompt": Value("string"), "completion": Value("string")}
        features = Features(kinds | {"label": ClassLabel(names=names)})
        rows = [{"prompt": "a", "completion": "b", "label": label} for label in (0, 1)]
        Dataset.from_list(rows, features=features).to_parquet(path)
        if desirable is None:
            with pytest.raises(RecipeError, match="neither desirable"):
                judged(tokenizer, path)
        else:
            assert [sample["is_desirable"] for sample in judged(tokenizer, path)] == desirable


@pytest.mark.parametrize("label", ["yes", None, 2, 0.5])
def test_another_label_is_an_error_with_its_location(
    tokenizer: Any, tmp_path: Path, label: Any
) -> None:
    path = jsonl(tmp_path / "a.jsonl", ROWS[0], ROWS[0] | {"label": label})
    with pytest.raises(RecipeError) as caught:
        judged(tokenizer, path)
    [problem] = caught.value.problems
    assert problem.what == "a completion is neither desirable (true) nor undesirable (false)"
    assert problem.where == f"{path}:2"
    assert problem.value == f"{label!r} in dataset.label_field label"


def test_pairs_become_their_preferred_answers_and_then_the_others(
    tokenizer: Any, tmp_path: Path
) -> None:
    rows = [
        {"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"},
        {"prompt": "Is it?", "chosen": " Yes", "rejected": " No"},
        {"prompt": "Same", "chosen": " a", "rejected": " a"},
    ]
    dataset = split_pairs(tokenizer, jsonl(tmp_path / "a.jsonl", *rows))
    samples = list(dataset)
    answers = [texts(tokenizer, sample)[1] for sample in samples]
    assert answers == [" 2</s>", " Yes</s>", " 3</s>", " No</s>"]
    assert [sample["is_desirable"] for sample in samples] == [True, True, False, False]
    assert len(dataset) == 4
    assert dataset.identity is not None


def test_a_micro_batch_has_each_prompt_with_another_completion(
    tokenizer: Any, tmp_path: Path
) -> None:
    dataset = judged(tokenizer, jsonl(tmp_path / "a.jsonl", *ROWS))
    loader = GlobalBatchLoader(
        dataset,
        global_batch_size=4,
        local_batch_size=4,
        collate_fn=KTOCollator(PadCollator(0)),
        shuffle=False,
        with_preceding=True,
    )
    [batch] = loader
    [micro_batch] = batch.micro_batches
    assert micro_batch["is_desirable"].tolist() == [True, False, True]
    rows = []
    for number in range(3):
        length = int(micro_batch["mismatched_attention_mask"][number].sum())
        row = {}
        for name in ("input_ids", "labels"):
            row[name] = micro_batch[f"mismatched_{name}"][number, :length].tolist()
        rows.append(texts(tokenizer, row))
    assert [prompt for prompt, _ in rows] == ["2 + 2 =", "3 + 5 is", "So"]
    # The first sample follows the last.
    assert [answer for _, answer in rows] == [" what</s>", " 4</s>", " equal to nine</s>"]


def test_samples_without_a_judgment_are_an_error() -> None:
    with pytest.raises(RecipeError, match=r"a sample lacks[\s\S]*value:  input_ids, labels"):
        KTOCollator(PadCollator(0))([{"input_ids": [1], "labels": [1]}] * 2)
