"""The index that names the file of each tensor is read in one way, whoever asks."""

import json
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.checkpoint.files.weight_map import read_weight_map
from automodel_ckpt.errors import AutomodelError, CheckpointUnusable, RecipeError


def index_with(directory: Path, content: Any) -> Path:
    path = directory / "model.safetensors.index.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "the index of the weights cannot be read"),
        ("[" * 100_000, "the index of the weights cannot be read"),
        ([1], "no weight_map of file names"),
        ({}, "no weight_map of file names"),
        ({"weight_map": ["a"]}, "no weight_map of file names"),
        ({"weight_map": {"a": 1}}, "outside of its directory"),
        ({"weight_map": {"a": "../x.safetensors"}}, "outside of its directory"),
        ({"weight_map": {"a": "/x.safetensors"}}, "outside of its directory"),
        ({"weight_map": {"a": "inner/x.safetensors"}}, "outside of its directory"),
        ({"weight_map": {"a": "x\0.safetensors"}}, "outside of its directory"),
        ({"weight_map": {"a": ""}}, "outside of its directory"),
    ],
)
@pytest.mark.parametrize("kind", [CheckpointUnusable, RecipeError])
def test_an_invalid_index_is_an_error_of_the_requested_kind(
    tmp_path: Path, content: Any, message: str, kind: type[AutomodelError]
) -> None:
    index = index_with(tmp_path, content)
    with pytest.raises(kind) as caught:
        read_weight_map(index, kind=kind)
    assert message in str(caught.value) and str(index) in str(caught.value)
