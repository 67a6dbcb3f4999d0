"""Texts with labels: how they are tokenized, truncated, cached and padded, and what is rejected with its row."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from automodel_ckpt.data.classification import LabelCollator, texts
from automodel_ckpt.data.samples.labels import Labels
from automodel_ckpt.errors import RecipeError
from tests.unit.data.toys import write

LABELS = Labels(("bad", "good"), "single_label")
ROWS = [
    {"text": "a b c", "other": "d", "label": "good"},
    {"text": "b", "other": "a a a", "label": 0},
]
TEMPLATE = "{% for m in messages %}[CLS]{{ m.content }}[SEP]{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of words that adds the special tokens of BERT, for pairs too."""
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "a", "b", "c", "d"]
    backend = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        chat_template=TEMPLATE,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def test_texts_have_the_special_tokens_of_the_tokenizer(tmp_path: Path, tokenizer: Any) -> None:
    found = list(texts(tokenizer, LABELS, write(tmp_path, *ROWS)))
    assert found == [
        {"input_ids": [1, 4, 5, 6, 2], "targets": [1.0]},
        {"input_ids": [1, 5, 2], "targets": [0.0]},
    ]


@pytest.mark.parametrize("side", ["right", "left"])
def test_pairs_have_types_and_keep_special_tokens_when_truncated(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    monkeypatch.setattr(tokenizer, "truncation_side", side)
    path = write(tmp_path, *ROWS)
    found = texts(tokenizer, LABELS, path, seq_length=6, pair_field="other", truncation="right")
    assert [sample["input_ids"] for sample in found] == [[1, 4, 5, 2, 7, 2], [1, 5, 2, 4, 4, 2]]
    assert [sample["token_type_ids"] for sample in found] == [
        [0, 0, 0, 0, 1, 1],
        [0, 0, 0, 1, 1, 1],
    ]
    assert found.counts["truncated"] == 2
    # From the cache, under the same key: truncation left no trace in the tokenizer.
    again = texts(
        tokenizer, LABELS, path, seq_length=6, pair_field="other", truncation="right", max_samples=1
    )
    assert list(again) == list(found)[:1]
    assert again.identity == found.identity


def test_messages_are_rendered_without_further_special_tokens(
    tmp_path: Path, tokenizer: Any
) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write(tmp_path, {"messages": turns, "score": 1.5})
    labels = Labels(("LABEL_0",), "regression")
    [found] = texts(tokenizer, labels, path, text_field="messages", label_field="score")
    assert found["targets"] == [1.5]
    assert (
        found["input_ids"]
        == tokenizer("[CLS]a[SEP][CLS]b[SEP]", add_special_tokens=False)["input_ids"]
    )
    with pytest.raises(RecipeError, match="no second text"):
        texts(
            tokenizer, labels, path, text_field="messages", pair_field="score", label_field="score"
        )


@pytest.mark.parametrize(
    ("row", "options", "what"),
    [
        ({"text": "a", "label": "goood"}, {}, "not one of classification.labels"),
        ({"text": "a b c d", "label": 1}, {"seq_length": 5}, "longer than seq_length"),
        ({"text": 3, "label": 1}, {}, "not text"),
    ],
)
def test_a_bad_row_is_named(
    tmp_path: Path, tokenizer: Any, row: dict[str, Any], options: dict[str, Any], what: str
) -> None:
    path = write(tmp_path, *ROWS, row)
    with pytest.raises(RecipeError, match=what) as caught:
        texts(tokenizer, LABELS, path, **options)
    assert f"{path}:3" in str(caught.value)


def test_a_null_is_not_the_label_none(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path, {"text": "a", "label": None})
    with pytest.raises(RecipeError, match=r"not one of classification\.labels"):
        texts(tokenizer, Labels(("None", "a"), "single_label"), path)


def test_a_text_without_tokens_is_rejected(tmp_path: Path, tokenizer: Any) -> None:
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0})))
    path = write(tmp_path, {"text": "", "label": 1})
    with pytest.raises(RecipeError, match="no tokens") as caught:
        texts(plain, LABELS, path)
    assert f"{path}:1" in str(caught.value)


def test_rows_are_padded_on_the_right_with_the_models_token() -> None:
    collate = LabelCollator(9, Labels(("a", "b"), "multi_label"), pad_to_multiple_of=4)
    batch = collate(
        [
            {"input_ids": [1, 2], "token_type_ids": [0, 1], "targets": [1.0, 0.0]},
            {
                "input_ids": [3, 4, 5, 6, 7],
                "token_type_ids": [0, 0, 1, 1, 1],
                "targets": [0.0, 1.0],
            },
        ]
    )
    assert batch["input_ids"].tolist() == [[1, 2, 9, 9, 9, 9, 9, 9], [3, 4, 5, 6, 7, 9, 9, 9]]
    assert batch["attention_mask"].sum(1).tolist() == [2, 5]
    assert batch["token_type_ids"][0].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert batch["labels"].tolist() == [0, 0]
    assert batch["targets"].dtype == torch.float32
    single = LabelCollator(0, LABELS)([{"input_ids": [1], "targets": [1.0]}])
    assert single["labels"].tolist() == [1]


def test_a_sample_without_a_label_is_rejected() -> None:
    with pytest.raises(RecipeError, match="a sample lacks input_ids or targets"):
        LabelCollator(0, LABELS)([{"input_ids": [1], "labels": [1]}])
