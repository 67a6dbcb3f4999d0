"""Which settings of images a teacher must have in common with its student."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import transformers

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.repository import RepositoryOptions
from automodel_ckpt.training.kinds.teacher import PretrainedTeacher, check_images
from tests.support.models.vision import FAMILIES


def teacher_in(directory: Path, config: Any, processor: Any = None) -> PretrainedTeacher:
    directory.mkdir(exist_ok=True)
    if processor is not None:
        processor.save_pretrained(directory)
    return PretrainedTeacher(str(directory), RepositoryOptions(), config)


CHANGES: list[tuple[str, str, Any]] = [
    ("llava", "vision_config.image_size", 32),
    ("llava", "vision_feature_select_strategy", "full"),
    ("gemma3", "mm_tokens_per_image", 16),
    ("gemma3", "boi_token_id", 1),
    ("idefics3", "scale_factor", 4),
    ("qwen2_5_vl", "vision_config.spatial_merge_size", 4),
    ("qwen2_5_vl", "vision_config.temporal_patch_size", 1),
    ("qwen2_5_vl", "vision_start_token_id", 1),
]


@pytest.mark.parametrize(("family", "key", "value"), CHANGES)
def test_a_setting_that_determines_the_tokens_of_an_image_is_compared(
    family: str, key: str, value: Any, tmp_path: Path
) -> None:
    student, processor = FAMILIES[family]()
    other, _ = FAMILIES[family]()
    check_images(teacher_in(tmp_path, other, processor), student, processor)
    part = other
    *parents, name = key.split(".")
    for parent in parents:
        part = getattr(part, parent)
    before = getattr(part, name)
    setattr(part, name, value)
    with pytest.raises(RecipeError) as raised:
        check_images(teacher_in(tmp_path, other, processor), student, processor)
    (problem,) = raised.value.problems
    ours, its = json.dumps(before), json.dumps(value)
    assert f"{name} is {its}, the student has {ours}" in str(problem.value)


def test_the_scale_of_pixels_is_compared_and_limits_of_their_number_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, processor = FAMILIES["qwen2_5_vl"]()
    _, other = FAMILIES["qwen2_5_vl"]()
    other.image_processor.size = {"shortest_edge": 16, "longest_edge": 1024}
    check_images(teacher_in(tmp_path / "limits", config, other), config, processor)
    other.image_processor.image_std = [0.25, 0.25, 0.25]
    with pytest.raises(RecipeError, match=r"image_processor\.image_std is \[0\.25"):
        # A student by _target_ has no configuration.
        check_images(teacher_in(tmp_path / "scale", config, other), None, processor)
    with caplog.at_level(logging.WARNING, "automodel_ckpt"):
        check_images(teacher_in(tmp_path / "none", config), config, processor)
    assert "has no processor, so how it expects pixels to be scaled is not compared" in caplog.text


def test_the_largest_image_of_a_tower_for_any_size_is_not_compared(tmp_path: Path) -> None:
    student, teacher = (
        transformers.LlavaConfig(vision_config={"model_type": "pixtral", "image_size": size})
        for size in (1024, 1540)
    )
    _, processor = FAMILIES["llava"]()
    check_images(teacher_in(tmp_path, teacher, processor), student, processor)
