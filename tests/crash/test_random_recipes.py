"""A sample of tools/random_recipes; `make random-recipes` checks many recipes."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.models.sizes import model_sizes
from tests.support.servers.command_server import CommandServer, Starting
from tools.random_recipes import check as checking
from tools.random_recipes.check import check, differences
from tools.random_recipes.draw import EXAMPLES, STEPS, Recipe


def test_a_recipe_is_resumed_exactly_and_a_difference_is_reported(
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

    first, resumed = tmp_path / "first", tmp_path / "resumed"
    log = resumed / "training.jsonl"
    text = log.read_text()
    line = next(json.loads(line) for line in text.splitlines() if f'"step": {STEPS}' in line)
    log.write_text(text.replace(f'"loss": {line["loss"]}', '"loss": 1.5'))
    [problem] = differences(first, resumed)
    assert problem.startswith(f"step {STEPS} differs")
    log.write_text(text)

    [last] = resumed.glob(f"epoch_*_step_{STEPS}")
    shutil.rmtree(last)
    [earlier] = resumed.glob("epoch_*_step_4")
    shutil.copytree(earlier, last)
    problems = list(differences(first, resumed))
    assert any(problem.startswith("model of the last checkpoints differs") for problem in problems)
    assert any(problem.startswith("optimizer") for problem in problems)
    assert any(problem.startswith("dataloader/") for problem in problems)
