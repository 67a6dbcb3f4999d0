"""Checkpointer in a program without a recipe file: its options and their defaults."""

import contextlib
import dataclasses
from pathlib import Path

import pytest
import torch

from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions
from automodel_ckpt.config.keys.checkpoint import CheckpointConfig
from automodel_ckpt.errors import RecipeError


def test_options_have_the_defaults_of_a_recipes_section() -> None:
    section = CheckpointConfig()
    for option in dataclasses.fields(CheckpointOptions):
        default, expected = option.default, getattr(section, option.name)
        if isinstance(default, tuple):
            expected = tuple(expected)
        assert default == expected, option.name


def save_once(checkpointer: Checkpointer, state: dict[str, object]) -> Path:
    return checkpointer.save(state, step=1, epoch=0).path


def test_a_recipes_section_is_accepted_as_options(tmp_path: Path) -> None:
    section = CheckpointConfig(model_save_format="torch_save", save_optimizer=False)
    with contextlib.closing(Checkpointer(tmp_path, options=section)) as checkpointer:
        path = save_once(checkpointer, {"model": torch.nn.Linear(2, 2)})
    assert (path / "model" / ".metadata").is_file()


def test_hugging_face_layouts_reject_the_format_torch_save(tmp_path: Path) -> None:
    options = CheckpointOptions(model_layout="hf", model_save_format="torch_save")
    with pytest.raises(RecipeError, match="always written as safetensors"):
        Checkpointer(tmp_path, options=options)
