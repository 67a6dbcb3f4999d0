"""Settings that a run passes to torch.compile, or to the process that uploads its checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from automodel_ckpt import load_recipe
from automodel_ckpt.parallel.mesh_sizes import RankLayout, Sizes
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.model.deferred_model import DeferredModel, shard
from tests.support.runs.recipes import SMALLEST


def compiled(recipe: Any) -> Any:
    """What torch.compile is asked to do with the layers of a model."""
    asked: list[Any] = []

    class Layer(nn.Module):
        def compile(self, **options: Any) -> None:
            asked.append(options)

        def forward(self) -> None:
            raise NotImplementedError

    model = nn.Sequential(nn.ModuleList([Layer()]), nn.Linear(1, 1))
    layout: Any = RankLayout(0, Sizes(), 0, torch.device("cpu"), None)  # type: ignore[arg-type]
    shard(DeferredModel(model), recipe.config, layout)
    return asked


def uploads(recipe: Any) -> Any:
    """The job of the process that uploads checkpoints, but for the token of this start."""
    recipe.layout = recipe.join_ranks()
    try:
        return {**recipe.build_checkpointer().transfers.uploads.job, "token": ""}
    finally:
        recipe.close()


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({"compile.enabled": False}, {"compile.enabled": True}),
        ({"compile.enabled": True}, {"compile.backend": "eager"}),
        ({"compile.enabled": True}, {"compile.mode": "max-autotune"}),
        ({"compile.enabled": True}, {"compile.fullgraph": True}),
        ({"compile.enabled": True}, {"compile.dynamic": True}),
        ({}, {"checkpoint.remote.options": {"anon": True}}),
        ({}, {"checkpoint.remote.keep_last": 2}),
        ({"checkpoint.remote.keep_last": 1}, {"checkpoint.remote.keep_best": 2}),
        ({"checkpoint.remote.keep_last": 1}, {"checkpoint.remote.keep_every_steps": 2}),
        ({"checkpoint.remote.keep_last": 1}, {"checkpoint.remote.keep_steps": [3]}),
        ({}, {"checkpoint.remote.max_mb_per_second": 2}),
        ({}, {"checkpoint.remote.num_threads": 2}),
    ],
    ids=str,
)
def test_a_changed_setting_is_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], changed: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(SMALLEST)
    seen = []
    for settings in (given, given | changed):
        is_remote = "remote" in str(changed)
        store = {"checkpoint.remote.url": f"file://{tmp_path}/store"} if is_remote else {}
        loaded = load_recipe("recipe.yaml", {**store, **settings})
        recipe = LLMFinetune(loaded.config, config_yaml=loaded.to_yaml())
        seen.append(uploads(recipe) if is_remote else compiled(recipe))
    assert seen[0] != seen[1]
