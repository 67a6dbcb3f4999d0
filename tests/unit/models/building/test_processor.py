"""Processors with a part for videos are read without it where torchvision is missing, and are saved as they were."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from PIL import Image

from automodel_ckpt.models import processor as processor_module
from automodel_ckpt.models.processor import read_processor, without_videos
from tests.support.models.vision import FAMILIES

VIDEOS = {"video_processor_type": "Qwen2VLVideoProcessor", "patch_size": 4, "min_frames": 3}


@pytest.fixture(autouse=True)
def _without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without it, wherever the tests run."""

    def unavailable(*arguments: Any, **options: Any) -> None:
        raise ImportError("AutoVideoProcessor requires the Torchvision library")

    monkeypatch.setattr(processor_module, "is_torchvision_available", lambda: False)
    monkeypatch.setattr(processor_module._AUTO, "from_pretrained", unavailable)


def hub_layout(directory: Path) -> Path:
    """Qwen2.5-VL's files as its makers published them: one per part, none for the whole."""
    config, made = FAMILIES["qwen2_5_vl"]()
    config.save_pretrained(directory)
    made.tokenizer.chat_template = made.chat_template
    made.tokenizer.save_pretrained(directory)
    images = made.image_processor.to_dict() | {"processor_class": "Qwen2_5_VLProcessor"}
    images["image_processor_type"] = "Qwen2VLImageProcessor"
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    (directory / "video_preprocessor_config.json").write_text(json.dumps(VIDEOS))
    return directory


def test_a_family_with_videos_is_read_for_its_images(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "automodel_ckpt"):
        made = read_processor(str(hub_layout(tmp_path)))
    assert "Qwen2_5_VLProcessor is loaded without its video processor" in caplog.text
    assert made.get_attributes() == ["image_processor", "tokenizer"]
    text = "<|vision_start|><|image_pad|><|vision_end|>what is this?"
    batch = made(text=[text], images=[[Image.new("RGB", (16, 8))]], return_tensors="pt")
    assert batch["image_grid_thw"].tolist() == [[1, 2, 4]]
    assert int(batch["mm_token_type_ids"].sum()) == 2  # four patches in one token


def test_what_the_files_say_of_videos_is_saved_again(tmp_path: Path) -> None:
    made = read_processor(str(hub_layout(tmp_path / "base")))
    made.save_pretrained(tmp_path / "saved")
    stored = json.loads((tmp_path / "saved" / "processor_config.json").read_text())
    assert stored["video_processor"] == VIDEOS
    assert stored["processor_class"] == "Qwen2_5_VLProcessor"
    again = read_processor(str(tmp_path / "saved"))  # without a model's config.json
    assert type(again) is type(made) is without_videos(transformers.Qwen2_5_VLProcessor)
    assert again.to_dict() == made.to_dict()


def test_without_the_files_of_such_a_family_the_first_error_stays(tmp_path: Path) -> None:
    transformers.LlavaConfig().save_pretrained(tmp_path)
    with pytest.raises(ImportError, match="Torchvision"):
        read_processor(str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(ImportError, match="Torchvision"):
        read_processor(str(tmp_path))
