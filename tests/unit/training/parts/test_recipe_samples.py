"""Sources with targets, and queries with documents, as samples: limits, start and end tokens, and batches."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from automodel_ckpt.data.seq2seq import SourceTargetCollator, source_target
from automodel_ckpt.data.text_pairs import ScoreCollator, has_types, text_pairs
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.examples.data.python_docs import train_tokenizer
from tests.fixtures.embedding import tiny_pairs as tiny


def test_texts_have_limits_and_end_tokens(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(vocab_size=300)
    path = tmp_path / "rows.jsonl"
    content = [{"source": "a b", "target": "c"}, {"source": "d", "target": "e f g h i j"}]
    path.write_text("\n".join(map(json.dumps, [*content, {"source": "k", "target": ""}])))
    end = tokenizer.eos_token_id
    samples = list(source_target(tokenizer, str(path), source_prompt="x "))
    assert tokenizer.decode(samples[0]["input_ids"], skip_special_tokens=True) == "x a b"
    for sample in samples:
        assert sample["labels"][-1] == end
        assert sample["labels"].count(end) == 1
    assert samples[2]["labels"] == [end]
    with pytest.raises(RecipeError, match="a target is longer than target_length") as error:
        source_target(tokenizer, str(path), target_length=4)
    assert "rows.jsonl:2 (" in error.value.problems[0].where
    cut = source_target(tokenizer, str(path), target_length=4, truncation="right")
    assert len(cut[1]["labels"]) == 4
    assert cut[1]["labels"][-1] == end
    assert len(source_target(tokenizer, str(path), target_length=4, truncation="skip")) == 2
    limits: dict[str, Any] = {"seq_length": 5, "target_length": 4, "streaming": True}
    for truncation in ("right", "skip"):
        stream = source_target(tokenizer, str(path), truncation=truncation, **limits)
        made = [stream.prepare(row) for row in stream]
        assert made[0]["labels"] == samples[0]["labels"]
        assert made[1]["labels"] == (cut[1]["labels"] if truncation == "right" else [])
        assert SourceTargetCollator(0)(made)["input_ids"].shape[0] == 3
    batch = SourceTargetCollator(0)([{"input_ids": [5, 6], "labels": [7]}, cut[1]])
    assert batch["labels"][0].tolist() == [7, -100, -100, -100]
    assert batch["attention_mask"].sum().item() == 2 + len(cut[1]["input_ids"])
    with pytest.raises(RecipeError, match="a source without tokens"):
        SourceTargetCollator(0)([{"input_ids": [], "labels": [1]}])


@pytest.mark.parametrize(
    ("template", "start", "labels", "cut"),
    [
        # BART starts with the end token; T5Gemma's tokenizer adds the start token and no end token; T5.
        ("<s> $A </s>", 1, [2, 4, 5, 6, 1], [2, 4, 1]),
        ("<s> $A", 2, [4, 5, 6, 1], [4, 5, 1]),
        ("$A </s>", 0, [4, 5, 6, 1], [4, 5, 1]),
    ],
)
def test_targets_have_one_start_and_an_end(
    tmp_path: Path, template: str, start: int, labels: list[int], cut: list[int]
) -> None:
    words = ["<pad>", "</s>", "<s>", "<unk>", "a", "b", "c"]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    backend.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<s>", 2), ("</s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", bos_token="<s>"
    )
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"source": "a", "target": "a b c"}))
    whole = source_target(tokenizer, str(path), start_token_id=start)
    assert next(iter(whole))["labels"] == labels
    shorter = source_target(
        tokenizer, str(path), start_token_id=start, target_length=3, truncation="right"
    )
    assert next(iter(shorter))["labels"] == cut


def tokenizer_with_types() -> Any:
    """A tokenizer with types, as BERT's: that of the fixture has one type for both texts."""
    tokenizer = tiny.tokenizer_of("bert")
    tokenizer.backend_tokenizer.post_processor = type(tokenizer.backend_tokenizer.post_processor)(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return tokenizer


def test_documents_are_read_together_with_their_query(tmp_path: Path) -> None:
    tokenizer = tokenizer_with_types()
    row = {"query": "ba bo", "positive": "ku", "negatives": ["la lo ra", "fa"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    path = str(tmp_path / "rows.jsonl")
    assert has_types(tokenizer, "")
    dataset: Any = text_pairs(tokenizer, path, seq_length=7, pair_template="")
    batch = ScoreCollator(0, 8, has_types=True)([dataset[0], dataset[0]])
    expected = tokenizer(
        ["ba bo"] * 3,
        ["ku", "la lo ra", "fa"],
        truncation=True,
        max_length=7,
        padding="max_length",
        return_tensors="pt",
    )
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert batch[name].shape == (6, 8)
        assert batch[name][3:, :7].equal(expected[name]), name
    assert batch["num_documents"].tolist() == [3, 3]
    assert (batch["labels"] != -100).equal(batch["attention_mask"].bool())
    dataset = text_pairs(tokenizer, path, pair_template="{{ document }} ku {{ query }}")
    batch = ScoreCollator(0)([dataset[0]])
    assert tokenizer.decode(batch["input_ids"][2]) == "[CLS] fa ku ba bo [SEP] [PAD] [PAD]"
    with pytest.raises(RecipeError, match="a query with its document is longer than seq_length"):
        text_pairs(tokenizer, path, seq_length=4, pair_template="", truncation="error")
    with pytest.raises(RecipeError, match="a sample is no query with its documents"):
        ScoreCollator(0)([{"input_ids": [1, 2], "labels": [1, 2]}])
