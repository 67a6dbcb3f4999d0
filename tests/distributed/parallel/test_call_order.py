"""Layers that only some ranks call in a step: an error with fsdp2, and the result of one process with ddp."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from automodel_ckpt.errors import RecipeError
from tests.support import ranks
from tests.support.models.sizes import model_sizes
from tests.support.runs.training import MODEL, RECIPE, trained_weights, write_recipe

TARGET = "model: {_target_: tests.distributed.parallel.test_call_order.%s}\n"


class Dropping(LlamaForCausalLM):
    """A Llama that leaves out layers 1 and 2 of 4 if the sum of the tokens is odd."""

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        layers = self.model.layers
        if int(input_ids.sum()) % 2:
            kept = [each for number, each in enumerate(layers) if number not in (1, 2)]
            self.model.layers = nn.ModuleList(kept)
        try:
            return super().forward(input_ids=input_ids, **options)
        finally:
            self.model.layers = layers


def dropping() -> LlamaForCausalLM:
    return Dropping(config())


def config() -> LlamaConfig:
    return LlamaConfig(**model_sizes(vocab=300, hidden=16, inner=16, layers=4, heads=2))


OPTIONS = (
    "--step_scheduler.max_steps=3",
    "--step_scheduler.local_batch_size=1",
    "--checkpoint.enabled=false",
)


def test_fsdp2_reports_layers_that_only_some_ranks_call(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, RECIPE.replace(MODEL, TARGET % "dropping"))
    words = (*OPTIONS, "--distributed.strategy=fsdp2")
    found = ranks.outcomes(trained_weights, 2, recipe, *words, init=False, timeout=60)
    for rank, outcome in enumerate(found):
        assert isinstance(outcome.error, RecipeError)
        (problem,) = outcome.error.problems
        assert "distributed.strategy to ddp" in problem.hint
        assert problem.value.startswith(f"rank {rank} ")
        assert "calls model.layers.1" in problem.value
        assert "calls model.layers.3" in problem.value


def test_ddp_trains_such_a_model_as_one_process_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, RECIPE.replace(MODEL, TARGET % "dropping"))
    (expected,) = ranks.run(trained_weights, 1, recipe, *OPTIONS, init=False)
    words = (*OPTIONS, "--distributed.strategy=ddp", "--logging.level=debug")
    for weights in ranks.run(trained_weights, 2, recipe, *words, init=False):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert "ddp looks for unused ones in each step" in capfd.readouterr().err
