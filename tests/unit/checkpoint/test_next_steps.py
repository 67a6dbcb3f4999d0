"""The commands that a log gives for an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.checkpoint.export.next_steps import hf_lines


@pytest.mark.parametrize(
    ("config", "auto_class"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "AutoModelForCausalLM"),
        ({"architectures": ["Gemma3ForCausalLM"]}, "AutoModelForCausalLM"),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}},
            "AutoModelForImageTextToText",
        ),
    ],
)
def test_the_class_that_loads_an_export_is_that_of_its_kind(
    tmp_path: Path, config: dict[str, Any], auto_class: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert f"transformers: {auto_class}.from_pretrained('{tmp_path}')" in hf_lines(tmp_path)
