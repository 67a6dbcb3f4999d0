"""A vision-language model with the shapes of CLIP ViT-L/14 and Llama 1B: the recipe and a bare loop."""

from collections.abc import Mapping
from itertools import repeat
from pathlib import Path
from typing import Any

from tools.gpu import bare, ours
from tools.gpu.session import Figures, PartRun
from tools.gpu.shapes import LLAMA_1B, TINY, Work, work_of

CLIP_LARGE: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
"""openai/clip-vit-large-patch14-336: an image is 576 tokens."""
_TINY_CLIP: dict[str, Any] = {
    **CLIP_LARGE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


def run(part: PartRun) -> None:
    """Ours by default, without padding and packed; then the bare loop on one batch that is on the device already."""
    session = part.session
    is_small = session.is_dry_run
    vision = _TINY_CLIP if is_small else CLIP_LARGE
    text = TINY if is_small else LLAMA_1B
    work = work_of(LLAMA_1B, is_dry_run=is_small, batch=4, warm_up=3, steps=10)
    base = part.base(llava(vision, text), "vlm", "AutoModelForImageTextToText")
    directory = session.scratch / part.name
    recipe = recipe_of(vision, work, base, directory, is_small=is_small)
    part.measure("ours", ours.measure, "ours", recipe, directory, work.warm_up, 0.0, limit=150)
    part.measure("bare", bare_loop, recipe, work, session.device, limit=150)
    part.remove_base("vlm")


def llava(vision: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a LLaVA of these parts, with the processor's token of images."""
    token = _image_token(_processor(vision))
    return {
        "model_type": "llava",
        "vision_config": dict(vision),
        "text_config": dict(text),
        "vision_feature_layer": -1,
        "image_seq_length": (vision["image_size"] // vision["patch_size"]) ** 2,
        "image_token_index": token,
    }


def _processor(vision: Mapping[str, Any]) -> Any:
    from tools.gpu.data import image_processor

    return image_processor(vision["image_size"], vision["patch_size"])


def _image_token(processor: Any) -> int:
    token: int = processor.tokenizer.convert_tokens_to_ids("<image>")
    return token


def recipe_of(
    vision: Mapping[str, Any], work: Work, base: Path, directory: Path, *, is_small: bool
) -> dict[str, Any]:
    """The recipe that trains the model in *base* with a frozen vision tower."""
    size = vision["image_size"]
    recipe = ours.recipe_of(work, base, directory)
    del recipe["tokenizer"]
    recipe["recipe"] = "tools.gpu.timed.TimedVLM"
    recipe["model"] = {"from_pretrained": str(base), "freeze": ["vision_tower"]}
    recipe["processor"] = {
        "_target_": "tools.gpu.data.image_processor",
        "image_pixels": size,
        "patch_pixels": vision["patch_size"],
    }
    recipe["dataset"] = {
        "_target_": "automodel_ckpt.examples.data.mock_images.mock_images",
        "num_samples": work.batch * (work.warm_up + work.steps),
        "image_size": [size, size],
        "num_words": 8 if is_small else 128,
    }
    recipe["dataloader"] = {"num_workers": 0 if is_small else 4}
    return recipe


def bare_loop(recipe: Mapping[str, Any], work: Work, device: str) -> Figures:
    """Forward, backward and fused AdamW in bfloat16 on one padded batch. Its preparation is not counted."""
    import torch
    from transformers import AutoModelForImageTextToText

    from automodel_ckpt.data.image_collate import ImageTextCollator
    from automodel_ckpt.examples.data.mock_images import mock_images
    from tools.gpu.data import image_processor

    sections = ours.merged(recipe, {})
    sections["processor"].pop("_target_")
    sections["dataset"].pop("_target_")
    processor = image_processor(**sections["processor"])
    dataset = mock_images(processor, **sections["dataset"])
    collate = ImageTextCollator(processor, frozenset([_image_token(processor)]))
    batch = collate([dataset[number] for number in range(work.batch)])
    num_tokens = int(batch["attention_mask"].sum())
    read: Any = AutoModelForImageTextToText.from_pretrained
    model = read(sections["model"]["from_pretrained"], dtype=torch.bfloat16).to(device)
    model.train().model.vision_tower.requires_grad_(False)
    inputs = {}
    for name, value in batch.items():
        value = value.to(device)
        inputs[name] = value.to(torch.bfloat16) if value.is_floating_point() else value
    yield from bare.train("bare", model, repeat(([inputs], num_tokens)), work)
