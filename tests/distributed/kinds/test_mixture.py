"""A recipe with a mixture: killed and resumed, and on two ranks."""

import json
from functools import partial
from pathlib import Path

import pytest

from automodel_ckpt.errors import RecipeError
from tests.support import ranks
from tests.support.runs.training import RECIPE, build, killed_after, steps_of, train, write_recipe

TOKENS = Path(__file__).parents[2] / "fixtures/megatron/tokens/large"
SOURCE = "{_target_: automodel_ckpt.examples.data.python_docs.language_modeling, seq_length: 16"
MIXTURE = f"""dataset:
  _target_: automodel_ckpt.data.mixture.mixture
  sources:
    docs: {SOURCE}, max_samples: 20}}
    more: {SOURCE}, max_samples: 30, split: validation}}
    noise: {{_target_: automodel_ckpt.examples.data.mock.random_tokens,
        num_samples: 9, seq_length: 12, vocab_size: 300}}
    tokens: {{_target_: automodel_ckpt.data.token_files.megatron, path: {TOKENS}, seq_length: 8}}
  weights: {{docs: 2, more: 1, noise: 1, tokens: 1}}
optimizer:"""
DATASET, _, _ = RECIPE.partition("dataset:")[2].partition("optimizer:")
EIGHT = "--step_scheduler.max_steps=8"
"""An epoch has 6 steps."""
TEXT = RECIPE.replace(f"dataset:{DATASET}optimizer:", MIXTURE)


def test_a_killed_run_of_a_mixture_continues_exactly_and_ranks_do_not_matter(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, TEXT)

    def run(name: str, num_ranks: int = 1, **options: int) -> object:
        training = partial(train, recipe, EIGHT, f"--checkpoint.checkpoint_dir={tmp_path / name}")
        if options:
            training = partial(training, recipe_class=killed_after(*options.values()))
        outcomes = ranks.outcomes(training, num_ranks, init=False)
        return outcomes[0].value

    whole = run("whole")
    assert "an epoch of 45 samples has 18 of docs" in capfd.readouterr().err
    run("killed", step=7)
    assert run("killed") == whole is not None
    run("two", num_ranks=2)
    samples = [
        [
            record["samples"]
            for record in map(
                json.loads, (tmp_path / name / "training.jsonl").read_text().splitlines()
            )
            if "loss" in record
        ]
        for name in ("whole", "two")
    ]
    assert samples[0] == samples[1] and len(samples[0]) == 8
    assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "whole")


def test_only_data_sets_can_be_sources(tmp_path: Path) -> None:
    text = TEXT.replace("automodel_ckpt.examples.data.mock.random_tokens", "os.system")
    with pytest.raises(RecipeError, match=r"dataset.sources.noise[\s\S]*os.system"):
        build(write_recipe(tmp_path, text))
    text = TEXT.replace("num_samples: 9", "num_sample: 9")
    with pytest.raises(RecipeError, match=r"unknown key dataset.sources.noise.num_sample"):
        build(write_recipe(tmp_path, text))
