"""Parameters that only some ranks use in a step: the gradients are those of one process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support import ranks
from tests.support.models.sizes import model_sizes
from tests.support.runs.training import MODEL, RECIPE, trained_weights, write_recipe

NUM_EXPERTS = 4
NEVER = NUM_EXPERTS - 1
"""The expert that no token chooses."""
TARGET = "model: {_target_: tests.distributed.parallel.test_unused_gradients.looped}\n"
OPTIONS = (
    "--step_scheduler.max_steps=3",
    "--optimizer.weight_decay=0.1",
    "--checkpoint.enabled=false",
    "--clip_grad_norm=null",
)
used_by_step: list[frozenset[int]] = []
"""The experts that this rank has used in each micro-batch."""


class LoopedExperts(nn.Module):
    """Calls only the experts that a token of the micro-batch chooses, as the code of many models on the Hub does."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(size, size) for _ in range(NUM_EXPERTS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        # Most tokens choose one expert, so that a micro-batch lacks some of the others.
        score = flat.detach().sum(dim=-1)
        chosen = torch.where(score > 4.2, 2, torch.where(score < -4.2, 1, 0))
        output = torch.zeros_like(flat)
        used_by_step.append(frozenset(chosen.tolist()))
        for number, expert in enumerate(self.experts):
            (tokens,) = torch.where(chosen == number)
            if len(tokens):
                output = output.index_add(0, tokens, expert(flat[tokens]))
        return output.view_as(hidden)


class WithAttributes(LlamaForCausalLM):
    """Returns an object in which torch finds no tensors."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return SimpleNamespace(logits=super().forward(*arguments, **options).logits)


def looped(with_attributes: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(**model_sizes(vocab=300, hidden=16, inner=16, layers=2, heads=2))
    model = (WithAttributes if with_attributes else LlamaForCausalLM)(config)
    for layer in model.model.layers:
        layer.mlp = LoopedExperts(config.hidden_size)
    return model


def trained(recipe_file: Path, *options: str) -> tuple[dict[str, torch.Tensor], Any]:
    """Train on this rank; the complete weights, and what each micro-batch used."""
    used_by_step.clear()
    return trained_weights(recipe_file, *OPTIONS, *options), list(used_by_step)


def training(recipe: Path, *options: str) -> Callable[[], Any]:
    return partial(trained, recipe, *options)


def test_experts_that_one_rank_does_not_use_get_the_gradient_of_the_others(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, RECIPE.replace(MODEL, TARGET))
    whole = "--step_scheduler.local_batch_size=8"
    (((expected, _),),) = ranks.run_each([training(recipe, whole)], 1)
    fsdp2, ddp = "--distributed.strategy=fsdp2", "--distributed.strategy=ddp"
    small = "--step_scheduler.local_batch_size=1"
    ways = [
        training(recipe, fsdp2, small),
        training(recipe, ddp, small, "--model.with_attributes=true"),
    ]
    for (weights, used_by_first), (_, used_by_second) in ranks.run_each(ways, 2):
        assert used_by_first != used_by_second
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_a_parameter_that_no_rank_uses_is_not_changed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, RECIPE.replace(MODEL, TARGET))
    fsdp2 = "--distributed.strategy=fsdp2"
    ways = [training(recipe, fsdp2, f"--step_scheduler.max_steps={steps}") for steps in (1, 3)]
    (first, _), (last, _) = (by_rank[0] for by_rank in ranks.run_each(ways, 2))
    unchanged = {name for name, value in first.items() if torch.equal(value, last[name])}
    of_expert = {name for name in first if f"mlp.experts.{NEVER}." in name}
    assert len(of_expert) == 4
    assert unchanged == of_expert
    assert f"got no gradient in the first step: 4 of them: model.layers.0.mlp.experts.{NEVER}" in (
        capfd.readouterr().err
    )


@pytest.mark.further
def test_summed_gradients_and_those_of_the_last_micro_batch_are_reduced_together(
    tmp_path: Path,
) -> None:
    recipe = write_recipe(tmp_path, RECIPE.replace(MODEL, TARGET))
    # fsdp2 sums in float32 what it does not reduce, and raises an error for sums beside gradients in bfloat16.
    options = (
        "--distributed.strategy=fsdp2",
        "--distributed.mixed_precision=bfloat16",
        "--step_scheduler.local_batch_size=1",
    )
    ways = [
        training(recipe, *options, f"--distributed.defer_gradient_sync={deferred}")
        for deferred in ("true", "false")
    ]
    for (weights, used), (expected, _) in zip(*ranks.run_each(ways, 2), strict=True):
        assert len(set(used)) > 1
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-2, atol=1e-3, msg=name)
