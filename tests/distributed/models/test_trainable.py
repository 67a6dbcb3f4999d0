"""Several models in one recipe: each is built by its own call, and only the trained one changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from tests.support import ranks
from tests.support.models.whole_state import whole_state
from tests.support.runs.training import MODEL, RECIPE, build, train, write_recipe

STILL = "--model.from_config.attention_dropout=0"


class WithReference(LLMFinetune):
    """Trains a model next to a frozen copy of what it starts from."""

    def build(self) -> None:
        super().build()
        before = dict(vars(self))
        self.reference = self.build_trainable(is_trained=False)
        changed = [name for name, value in vars(self).items() if before.get(name) is not value]
        assert changed == ["reference"]


def values(trainable: Any) -> list[torch.Tensor]:
    """All parameters, unsharded."""
    return list(whole_state(trainable.model, with_buffers=False).values())


def loss_of(trainable: Any, recipe: WithReference) -> float:
    batch = next(iter(recipe.build_dataloader(recipe.config.dataset)))
    objective = recipe.objective_class(trainable, recipe.layout, recipe.loss_fn)
    with torch.no_grad():
        return sum(loss.item() for loss in objective.losses(batch.micro_batches))


def trained_next_to_a_reference(recipe_file: Path, strategy: str) -> tuple[Any, ...]:
    directory = f"--checkpoint.checkpoint_dir={recipe_file.parent / 'run'}"
    options = (
        STILL,
        directory,
        "--step_scheduler.max_steps=2",
        f"--distributed.strategy={strategy}",
    )
    recipe = build(recipe_file, *options, recipe_class=WithReference)
    assert isinstance(recipe, WithReference)
    try:
        recipe.setup()
        start = values(recipe.trainable)
        losses = [loss_of(recipe.trainable, recipe), loss_of(recipe.reference, recipe)]
        recipe.run()
        losses += [loss_of(recipe.trainable, recipe), loss_of(recipe.reference, recipe)]
        pairs = list(zip(start, values(recipe.reference), strict=True))
        has_changed = [not torch.equal(a, b) for a, b in pairs]
        gradients = [p.requires_grad for p in recipe.reference.model.parameters()]
        return losses, any(has_changed), any(gradients), recipe.reference.model.training
    finally:
        recipe.close()


@pytest.mark.parametrize(
    ("num_ranks", "strategy"),
    [
        pytest.param(1, "auto", marks=pytest.mark.further),
        (2, "fsdp2"),
        pytest.param(2, "ddp", marks=pytest.mark.further),
    ],
)
def test_a_frozen_model_next_to_the_trained_one_starts_equal_and_does_not_change(
    tmp_path: Path, num_ranks: int, strategy: str
) -> None:
    recipe = write_recipe(tmp_path)
    ended = ranks.run(trained_next_to_a_reference, num_ranks, recipe, strategy, init=False)
    for losses, has_changed, has_gradients, is_training in ended:
        trained_before, frozen_before, trained_after, frozen_after = losses
        assert trained_before == pytest.approx(frozen_before, rel=1e-6)
        assert frozen_before == frozen_after
        assert trained_after != trained_before
        assert not (has_changed or has_gradients or is_training)
    saved = {path.name for path in (tmp_path / "run/LATEST").iterdir()}
    assert "model" in saved and "reference" not in saved


DOGE = """
model:
  from_config:
    model_type: doge
    hidden_size: 16
    intermediate_size: 24
    num_hidden_layers: 1
    num_attention_heads: 4
    num_key_value_heads: 2
    max_position_embeddings: 32
"""


def test_a_tensor_parallel_plan_that_does_not_fit_its_model_is_an_error_before_training(
    tmp_path: Path,
) -> None:
    """The plan of transformers 5.23 for Doge shards the queries, and not the mask that is computed from the values."""
    text = RECIPE.replace(MODEL, DOGE)
    assert text != RECIPE
    recipe = write_recipe(tmp_path, text)
    for outcome in ranks.outcomes(
        lambda: train(recipe, "--distributed.tp_size=2"), 2, init=False, timeout=120
    ):
        assert isinstance(outcome.error, RecipeError)
        assert "cannot be computed with its tensor parallel plan" in str(outcome.error)
        assert "with its own plan: RuntimeError: The size of tensor" in str(outcome.error)
