"""Settings that a dry run proposes to save memory: which ones, in the order of what they cost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from automodel_ckpt.cli.checks.dry_run import _device_rows
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.parallel.mesh_sizes import Sizes
from automodel_ckpt.training.forecast import advice
from automodel_ckpt.training.forecast.advice import Advice, Proposal
from automodel_ckpt.training.forecast.candidates import compact, smaller
from tests.support.runs.training import RECIPE, build, write_recipe

FSDP2 = "--distributed.strategy=fsdp2"
OFFLOAD = "--distributed.cpu_offload=true"
MODEL = SimpleNamespace()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = RECIPE.replace("optimizer:\n  lr: 1e-2\n", "optimizer:\n  weight_decay: 0.1\n")
    return write_recipe(tmp_path_factory.mktemp("recipe"), text)


def config_of(recipe: Path, *overrides: str) -> RecipeConfig:
    config: RecipeConfig = build(recipe, *overrides).config
    return config


def test_ranks_that_replicate_the_model_are_proposed_to_divide_it(recipe: Path) -> None:
    sizes = Sizes(dp_shard=2)
    of_ddp = list(smaller(config_of(recipe, "--distributed.strategy=ddp"), MODEL, sizes))
    words = [candidate.overrides for candidate in of_ddp]
    assert words[:2] == [
        ("--step_scheduler.local_batch_size=2",),
        ("--step_scheduler.local_batch_size=1",),
    ]
    assert words[2] == (FSDP2,)
    assert of_ddp[2].config.distributed.strategy == "fsdp2"
    with_more_ranks = [each for each in words if any("nproc" in word for word in each)]
    assert with_more_ranks and all(FSDP2 in each for each in with_more_ranks)
    of_fsdp2 = smaller(config_of(recipe, FSDP2), MODEL, sizes)
    assert not any(FSDP2 in each.overrides for each in of_fsdp2 if OFFLOAD not in each.overrides)


def test_8_bit_adamw_gets_the_recipes_options(recipe: Path) -> None:
    def optimizer_words(*overrides: str) -> list[str]:
        candidate = next(compact(config_of(recipe, *overrides), MODEL, Sizes()))
        return [word for word in candidate.overrides if word.startswith("--optimizer.")]

    words = optimizer_words()
    # The recipe has no rate. The default of the class, 1e-3, is ten times that of recipes.
    assert words[1:] == ["--optimizer.float32_weights=true", "--optimizer.lr=0.0001"]
    assert optimizer_words("--optimizer.lr=1e-3") == words[:2]


def test_offloaded_state_is_not_proposed_to_be_smaller(recipe: Path) -> None:
    config = config_of(recipe, FSDP2, OFFLOAD)
    assert not list(compact(config, MODEL, Sizes()))
    found = smaller(config, MODEL, Sizes())
    assert not any(OFFLOAD in candidate.overrides for candidate in found)


def test_settings_that_no_checkpoint_of_the_run_continues_with_are_for_a_new_run() -> None:
    memory: Any = SimpleNamespace(total=8 * 10**8)
    proposals = [Proposal(("--a=1",), memory), Proposal(("--b=1",), memory, "c", True)]
    given = Advice(False, tuple(proposals), missing_bytes=5)
    plan: Any = SimpleNamespace(
        device=SimpleNamespace(nbytes=10**9, name="GPU"), advice=given, memory=memory
    )
    new, resumed = (
        [text for _, text in _device_rows(plan, resumes=each)] for each in (False, True)
    )
    assert new[:2] == resumed[:2]
    assert "new run" not in new[2] and "new run" in resumed[2]


def test_a_model_whose_state_does_not_fit_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def estimated(_: Any, *, with_activations: bool = True) -> Any:
        asked.append(with_activations)
        return SimpleNamespace(total=10, activations=0)

    monkeypatch.setattr(advice, "estimate_memory", estimated)
    candidate: Any = SimpleNamespace(applied_to=lambda recipe: recipe, overrides=())
    recipe: Any = None
    assert not advice._Forecasts(recipe, 5).fits(candidate)
    assert asked == [False]
