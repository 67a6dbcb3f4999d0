"""Several models in one recipe: each is built by its own call, and only the trained one changes."""

from pathlib import Path

from automodel_ckpt.errors import RecipeError
from tests.support import ranks
from tests.support.runs.training import MODEL, RECIPE, train, write_recipe

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
