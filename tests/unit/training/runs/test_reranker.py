"""The recipe ``reranker``: its losses are those of plain torch, and its exports compute the scores of training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from automodel_ckpt.cli.train import main
from tests.fixtures.embedding import tiny_pairs as tiny
from tests.support.runs import pair_recipes

TEMPLATE = "find {{ query }} ba {{ document }}"


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


@pytest.mark.parametrize(
    ("kind", "template"),
    [("bert", None), pytest.param("llama", TEMPLATE, marks=pytest.mark.further)],
)
def test_the_loss_is_that_of_choosing_the_first_document_and_exports_have_its_scores(
    tmp_path: Path, kind: str, template: str | None
) -> None:
    recipe = pair_recipes.write_reranker(tmp_path, kind, with_head=True)
    # The scores are divided by reranker.temperature, which is 0.5.
    words = [str(recipe), "--dataloader.shuffle=false", "--checkpoint.save_consolidated=every"]
    if template is not None:
        words += [f"--reranker.template={template}", "--reranker.attention=bidirectional"]
    # The second step's loss is that of the exported weights.
    words += ["--step_scheduler.max_steps=2", "--step_scheduler.ckpt_every_steps=1"]
    assert main(words) == 0
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
    tmp_path: Path, capfd: pytest.CaptureFixture[str], override: str, what: str
) -> None:
    assert main([str(pair_recipes.write_reranker(tmp_path)), override]) == 2
    assert what in capfd.readouterr().err
