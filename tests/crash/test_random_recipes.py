"""A sample of tools/random_recipes; `make random-recipes` checks many recipes."""

from pathlib import Path

import pytest

from tests.support.models.sizes import model_sizes
from tests.support.servers.command_server import CommandServer, Starting
from tools.random_recipes import check as checking
from tools.random_recipes.check import check
from tools.random_recipes.draw import EXAMPLES, STEPS, Recipe


def test_a_recipe_is_resumed_exactly(
    tmp_path: Path, commands: CommandServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "subprocess", Starting(commands))
    model = {"model_type": "llama", **model_sizes(hidden=16, inner=16, layers=1, heads=2)}
    options = {
        "model": {"from_config": model},
        "step_scheduler.max_steps": STEPS,
        "step_scheduler.ckpt_every_steps": 2,
        "step_scheduler.global_batch_size": 4,
        "step_scheduler.local_batch_size": 2,
        "dataset.seq_length": 32,
        "validation_dataset": None,
        "ema": {"decay": 0.9},
        "checkpoint.is_async": True,
    }
    example = EXAMPLES / "llm_finetune" / "tiny_llama_python_docs.yaml"
    recipe = Recipe(2, "llm_finetune", example, ranks=1, other_ranks=2, options=options)
    result = check(recipe, tmp_path)
    assert (result.outcome, result.problems) == ("trained", [])
