"""Settings that a dry run proposes to save memory: which ones, in the order of what they cost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.parallel.mesh_sizes import Sizes
from automodel_ckpt.training.forecast.candidates import smaller
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
