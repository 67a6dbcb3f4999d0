"""The recipe ``reranker``: its losses are those of plain torch, and its exports compute the scores of training."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from automodel_ckpt.data.samples.tokenized import TokenizedDataset
from automodel_ckpt.data.text_pairs import ScoreCollator, check_negatives, has_types, text_pairs
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.recipes.reranker import Reranker
from tests.fixtures.embedding import tiny_pairs as tiny
from tests.support.runs import pair_recipes

TEMPLATE = "find {{ query }} ba {{ document }}"


trained = partial(pair_recipes.trained, recipe_class=Reranker)


def records(run: Path, name: str = "training") -> list[dict[str, Any]]:
    lines = map(json.loads, (run / f"{name}.jsonl").read_text().splitlines())
    return [record for record in lines if "event" not in record]


def scored(export: Path, row: dict[str, Any], template: str | None) -> torch.Tensor:
    """The scores of a row's documents, by transformers alone: one text at a time."""
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForSequenceClassification.from_pretrained(export).eval()
    query, *documents = row.values()
    scores = []
    for document in documents:
        texts = [query, document]
        if template is not None:
            texts = [template.replace("{{ query }}", query).replace("{{ document }}", document)]
        tokens = tokenizer(*texts, truncation=True, max_length=16, return_tensors="pt")
        if "llama" in model.config.model_type:
            tokens.pop("token_type_ids", None)
        with torch.no_grad():
            scores.append(model(**tokens).logits.squeeze())
    return torch.stack(scores)


@pytest.mark.parametrize(("kind", "template"), [("bert", None), ("llama", TEMPLATE)])
def test_the_loss_is_that_of_choosing_the_first_document_and_exports_have_its_scores(
    tmp_path: Path, kind: str, template: str | None
) -> None:
    recipe = pair_recipes.write_reranker(tmp_path, kind, with_head=True)
    # The scores are divided by reranker.temperature, which is 0.5.
    options = ["--dataloader.shuffle=false", "--checkpoint.save_consolidated=every"]
    if template is not None:
        options += [f"--reranker.template={template}", "--reranker.attention=bidirectional"]
    # The second step's loss is that of the exported weights.
    trained(
        recipe, *options, "--step_scheduler.max_steps=2", "--step_scheduler.ckpt_every_steps=1"
    ).close()
    export = tmp_path / "run" / "epoch_0_step_1" / "model" / "consolidated"
    config = json.loads((export / "config.json").read_text())
    assert config.get("is_causal", True) is (template is None)
    losses, ranks = [], []
    rows = tiny.rows(3)
    for row in rows[6:12]:
        scores = scored(export, row, template) / 0.5
        losses.append(F.cross_entropy(scores, torch.tensor(0)).item())
        ranks.append(int((scores >= scores[0]).sum()))
    step = records(tmp_path / "run")[1]
    assert step["loss"] == pytest.approx(sum(losses) / 6, rel=1e-5)
    assert step["accuracy"] == pytest.approx(sum(rank == 1 for rank in ranks) / 6)
    assert step["queries"] == 6
    ranks = [
        int((scores >= scores[0]).sum())
        for scores in (scored(export, row, template) for row in rows[:17])
    ]
    validation = records(tmp_path / "run", "validation")[0]
    assert validation["val_mrr"] == pytest.approx(sum(1 / rank for rank in ranks) / 17, rel=1e-5)
    assert validation["val_accuracy"] == pytest.approx(sum(rank == 1 for rank in ranks) / 17)


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


@pytest.mark.parametrize("has_types_", [False, True])
def test_queries_without_negatives_are_counted_and_rejected_if_all_are(
    has_types_: bool, caplog: pytest.LogCaptureFixture
) -> None:
    document = [False, *([True, False] if has_types_ else []), True]

    def dataset_of(*counts: int) -> TokenizedDataset:
        lengths = [count * len(document) for count in counts]
        tokens = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        labelled = np.array(document * sum(counts))
        return TokenizedDataset(tokens, np.cumsum(lengths), labelled, np.zeros(3, np.int64))

    dataset = dataset_of(1, 3, 1, 2)
    check_negatives(dataset, has_types=has_types_, where="dataset")
    assert "2 of 4 queries have no negative document" in caplog.text
    check_negatives(dataset_of(3), has_types=has_types_, where="dataset")
    check_negatives([], has_types=has_types_, where="dataset")
    assert len(caplog.records) == 1
    with pytest.raises(RecipeError, match="no query has a negative document"):
        check_negatives(dataset_of(1), has_types=has_types_, where="dataset")


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("--dataset.max_negatives=0", "no query has a negative document"),
        ("--reranker.template=a {{ query }}", "no place for the query or for the document"),
        ("--dataset.pair_template=a", "the template is part of the recipe"),
        ("--packed_sequence.size=32", "a row has one label or score"),
        ("--dataset._target_=automodel_ckpt.data.text.text", "trains on pairs"),
    ],
)
def test_what_a_reranker_does_not_support_is_an_error(
    tmp_path: Path, override: str, what: str
) -> None:
    with pytest.raises(RecipeError, match=what):
        trained(pair_recipes.write_reranker(tmp_path), override)
