"""Recipes on nodes without shared storage: keys that need all files on a node are errors."""

from types import SimpleNamespace
from typing import Any

import pytest

from automodel_ckpt.config.keys.checkpoint import CheckpointConfig, HubConfig, RemoteConfig
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.training.recipe_parts import check_without_shared_storage


@pytest.mark.parametrize("key", ["save_consolidated", "export_best", "export_ema", "hub"])
def test_what_needs_all_files_on_a_node_is_an_error(key: str) -> None:
    section: dict[str, Any] = {} if key == "hub" else {key: True}
    checkpoint = CheckpointConfig(remote=RemoteConfig("s3://bucket/run"), **section)
    config: Any = SimpleNamespace(checkpoint=checkpoint, hub=None, peft=None)
    config.hub = HubConfig("org/name") if key == "hub" else None
    with pytest.raises(RecipeError) as caught:
        check_without_shared_storage(config)
    problem = caught.value.problems[0]
    assert problem.where.endswith(key) and "scratch_dir" in problem.hint
