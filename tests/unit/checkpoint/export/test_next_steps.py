"""The commands that a log gives for an export."""

import json
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.checkpoint.export.next_steps import hf_lines, model_files_lines


@pytest.mark.parametrize(
    ("config", "auto_class"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "AutoModelForCausalLM"),
        (
            {"architectures": ["NewForConditionalGeneration"], "vision_config": {}},
            "AutoModelForImageTextToText",
        ),
        (
            {"architectures": ["Qwen2AudioForConditionalGeneration"], "audio_config": {}},
            "AutoModelForMultimodalLM",
        ),
        (
            {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
            "AutoModelForSeq2SeqLM",
        ),
    ],
)
def test_the_class_that_loads_an_export_is_that_of_its_kind(
    tmp_path: Path, config: dict[str, Any], auto_class: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    lines = hf_lines(tmp_path)
    assert f"transformers: {auto_class}.from_pretrained('{tmp_path}')" in lines
    prompt = "a source text" if auto_class == "AutoModelForSeq2SeqLM" else "Once upon a time"
    assert f'try it:       ckpt generate {tmp_path} -p "{prompt}"' in lines
    is_served = any("vllm serve" in line for line in lines)
    assert is_served == (auto_class != "AutoModelForSeq2SeqLM")


@pytest.mark.parametrize(
    ("task_type", "beside", "command"),
    [
        ("CAUSAL_LM", "chat_template.jinja", "ckpt chat {}"),
        (None, None, 'ckpt generate {} -p "Once upon a time"'),
        ("SEQ_CLS", None, None),
    ],
)
def test_adapters_are_tried_as_they_are_if_their_model_generates_text(
    tmp_path: Path, task_type: str | None, beside: str | None, command: str | None
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"task_type": task_type}))
    if beside is not None:
        (tmp_path / beside).touch()
    expected = [f"adapters, as peft loads them: {tmp_path}"]
    if command is not None:
        expected.append(f"try it: {command.format(tmp_path)}")
    assert model_files_lines(tmp_path) == expected
