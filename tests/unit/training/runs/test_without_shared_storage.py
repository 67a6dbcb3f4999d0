"""Recipes on nodes without shared storage: defaults are possible, and keys that need all files on a node are errors."""

from types import SimpleNamespace
from typing import Any

import pytest

from automodel_ckpt.config.keys.checkpoint import (
    CheckpointConfig,
    HubConfig,
    MemoryConfig,
    RemoteConfig,
)
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.training.saves.checkpointing import check_without_shared_storage

URL = "s3://bucket/run"


def recipe(hub: HubConfig | None = None, peft: object = None, **section: Any) -> Any:
    checkpoint = CheckpointConfig(remote=RemoteConfig(URL), **section)
    return SimpleNamespace(checkpoint=checkpoint, hub=hub, peft=peft)


@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("checkpoint.save_consolidated", {"save_consolidated": "final"}),
        ("checkpoint.save_consolidated", {"save_consolidated": True}),
        ("checkpoint.model_layout", {"model_layout": "adapter"}),
        ("checkpoint.export_best", {"export_best": True}),
        ("checkpoint.export_ema", {"export_ema": True}),
        ("checkpoint.average_last", {"average_last": 2}),
        ("checkpoint.memory", {"memory": MemoryConfig()}),
        ("hub", {"hub": HubConfig("org/name")}),
    ],
)
def test_what_needs_all_files_on_a_node_is_an_error(key: str, section: dict[str, Any]) -> None:
    with pytest.raises(RecipeError) as caught:
        check_without_shared_storage(recipe(**section))
    problem = caught.value.problems[0]
    assert problem.where == key and "scratch_dir" in problem.hint
