"""The commands that a log gives for an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from automodel_ckpt.checkpoint.export.next_steps import _image_text_models, hf_lines


@pytest.mark.parametrize(
    ("config", "auto_class"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "AutoModelForCausalLM"),
        ({"architectures": ["Gemma3ForCausalLM"]}, "AutoModelForCausalLM"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "AutoModelForImageTextToText"),
        ({"architectures": ["FuyuForCausalLM"]}, "AutoModelForImageTextToText"),
        ({"architectures": ["ChameleonForConditionalGeneration"]}, "AutoModelForImageTextToText"),
        (
            {"architectures": ["NewForConditionalGeneration"], "vision_config": {}},
            "AutoModelForImageTextToText",
        ),
        ({}, "AutoModelForCausalLM"),
    ],
)
def test_the_class_that_loads_an_export_is_that_of_its_kind(
    tmp_path: Path, config: dict[str, Any], auto_class: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert f"transformers: {auto_class}.from_pretrained('{tmp_path}')" in hf_lines(tmp_path)


def test_the_classes_of_models_with_images_are_those_of_transformers() -> None:
    assert _image_text_models() == set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values())
