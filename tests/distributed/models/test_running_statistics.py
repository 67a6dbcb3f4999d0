"""Batch normalization: ranks have the statistics of rank 0 after each step, and frozen layers keep theirs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support import ranks
from tests.support.models.sizes import model_sizes
from tests.support.runs.training import MODEL, RECIPE, trained_weights, write_recipe

TARGET = "model: {_target_: tests.distributed.models.test_running_statistics.%s}\n"
STEPS = "--step_scheduler.max_steps=2"
STATISTICS = ("running_mean", "running_var")


class Normalized(nn.Module):
    """An MLP behind batch normalization over the tokens of a micro-batch."""

    def __init__(self, mlp: nn.Module, size: int) -> None:
        super().__init__()
        self.mlp, self.norm = mlp, nn.BatchNorm1d(size)

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.mlp(self.norm(hidden.transpose(1, 2)).transpose(1, 2))


def normalized() -> LlamaForCausalLM:
    config = LlamaConfig(**model_sizes(vocab=300, hidden=16, inner=16, layers=2, heads=2))
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp = Normalized(layer.mlp, config.hidden_size)
    return model


def frozen() -> LlamaForCausalLM:
    model = normalized()
    for layer in model.model.layers:
        layer.mlp.norm.requires_grad_(False)
    return model


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("ddp", marks=pytest.mark.further)])
def test_all_ranks_have_the_statistics_of_the_first(strategy: str, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, RECIPE.replace(MODEL, TARGET % "normalized"))
    options = (
        f"--distributed.strategy={strategy}",
        f"--checkpoint.checkpoint_dir={tmp_path / 'run'}",
    )
    first, second = ranks.run(trained_weights, 2, recipe, STEPS, *options, init=False)
    changed = [name for name in first if name.endswith(STATISTICS)]
    assert len(changed) == 4
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    for name in changed:
        assert first[name].unique().numel() > 1


def test_frozen_layers_keep_their_statistics(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, RECIPE.replace(MODEL, TARGET % "frozen"))
    (values,) = ranks.run(
        trained_weights, 1, recipe, STEPS, "--checkpoint.enabled=false", init=False
    )
    for name, value in values.items():
        if name.endswith(STATISTICS):
            assert value.unique().numel() == 1, name
    assert "2 frozen layers of batch normalization keep their statistics" in capfd.readouterr().err
