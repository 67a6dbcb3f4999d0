"""Log-probabilities of answers, of the trained model and of its reference, whatever divides the model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ranks
from tests.support.runs.compared_recipes import Compared
from tests.support.runs.training import build, write_recipe

STILL = "--model.from_config.attention_dropout=0"
DROPOUT = "--model.from_config.attention_dropout=0.5"
LORA = "--peft={r: 2, base_dir: %s, target_modules: [q_proj, lm_head]}"
UNTIED = "--model.from_config.tie_word_embeddings=false"


def measured(recipe_file: Path, *options: str) -> dict[str, Any]:
    """The log-probabilities of rows before and after the trained parameters change."""
    directory = f"--checkpoint.checkpoint_dir={recipe_file.parent / 'run'}"
    recipe = build(recipe_file, directory, *options, recipe_class=Compared)
    try:
        recipe.setup()
        objective = recipe.objective
        rows = dict(next(iter(recipe.dataloader)).micro_batches[0])
        rows["labels"] = rows["labels"].clone()
        # A row without labels, and one with labels on its end.
        rows["labels"][0] = -100
        rows["labels"][1, :5] = -100
        found: dict[str, Any] = {"reference": listed(objective.reference_log_probs(rows))}
        before = {name: p.requires_grad for name, p in recipe.model.named_parameters()}
        with torch.no_grad():
            for parameter in recipe.model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.5).add_(0.05)
        found["trained"] = listed(objective.log_probs(rows))
        found["reference_after"] = listed(objective.reference_log_probs(rows))
        full = replace(recipe.trainable, loss_head=None)
        if recipe.layout.world_size == 1:
            found["from_logits"] = listed(objective.log_probs(rows, full))
        assert {name: p.requires_grad for name, p in recipe.model.named_parameters()} == before
        assert recipe.model.training
        objective.log_probs(rows).sum().backward()
        found["gradients"] = sum(p.grad is not None for p in recipe.model.parameters())
        return found
    finally:
        recipe.close()


def listed(log_probs: torch.Tensor) -> list[float]:
    return log_probs.detach().tolist()  # type: ignore[no-any-return]


def test_log_probabilities_are_those_of_one_process_and_of_full_logits(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    whole = measured(recipe, STILL)
    assert whole["from_logits"] == pytest.approx(whole["trained"], rel=1e-5)
    assert whole["trained"][0] == 0 and whole["trained"][1] < 0
    assert whole["reference_after"] == whole["reference"]
    assert whole["trained"][1] != pytest.approx(whole["reference"][1], rel=1e-2)
    # Two ranks of fsdp2 would read other rows.
    [first, second] = ranks.run(
        partial(measured, recipe, STILL, "--distributed.tp_size=2"), 2, init=False
    )
    for name in ("trained", "reference", "reference_after"):
        assert first[name] == second[name] == pytest.approx(whole[name], rel=1e-4)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_base_of_adapters_is_the_reference(tmp_path: Path, num_ranks: int) -> None:
    base = LORA % (tmp_path / "base")
    # Dropout shows whether the reference is evaluated as it would be in a validation.
    found, *_ = ranks.run(
        partial(measured, write_recipe(tmp_path), base, UNTIED, DROPOUT), num_ranks, init=False
    )
    assert found["reference_after"] == found["reference"]
    assert found["trained"][1] != pytest.approx(found["reference"][1], rel=1e-2)
    assert found["gradients"] > 0
