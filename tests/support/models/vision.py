"""Tiny vision-language models of several families with their processors, and conversations with images to train on."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

from automodel_ckpt.models.processor import read_processor, without_videos
from tests.support.models.sizes import model_sizes

TEXT = model_sizes(hidden=32, inner=48, layers=2, heads=2, kv_heads=2, positions=128)
VISION = {**model_sizes(hidden=32, inner=48, layers=2, heads=2), "image_size": 16, "patch_size": 4}
QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "out_hidden_size": 32,
}
TEMPLATE = (
    "<s>{% for m in messages %}<|{{ m['role'] }}|>{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}IMAGE{% else %}{{ c['text'] }}{% endif %}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 200, 30),
    "blue": (40, 40, 230),
    "grey": (120, 120, 120),
}


def tokenizer_with(*tokens: str, **special: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that knows these special *tokens*; *special* are further named ones (``image_token``)."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", *tokens],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(["What colour is this? It is " + " ".join(COLOURS)] * 3, trainer)
    options: dict[str, Any] = {"extra_special_tokens": special} if special else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", **options
    )


def llava() -> tuple[Any, Any]:
    tokenizer = tokenizer_with("<image>")
    images = transformers.CLIPImageProcessorPil(
        size={"height": 16, "width": 16}, do_center_crop=False
    )
    processor = transformers.LlavaProcessor(
        images,
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
    )
    config = transformers.LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **VISION},
        text_config={"model_type": "llama", **TEXT},
        vision_feature_layer=-2,
        image_seq_length=16,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    return config, processor


def idefics3_settings(tokenizer: Any) -> dict[str, Any]:
    return {
        "vision_config": VISION,
        "text_config": {"model_type": "llama", **TEXT, "pad_token_id": 0},
        "scale_factor": 2,
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "tie_word_embeddings": True,
    }


def idefics3() -> tuple[Any, Any]:
    places = [f"<row_{row}_col_{column}>" for row in range(1, 3) for column in range(1, 3)]
    tokenizer = tokenizer_with(
        "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *places
    )
    images = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 16}, do_image_splitting=True
    )
    processor = transformers.Idefics3Processor(
        images, tokenizer, image_seq_len=4, chat_template=TEMPLATE.replace("IMAGE", "<image>")
    )
    return transformers.Idefics3Config(**idefics3_settings(tokenizer)), processor


def gemma3() -> tuple[Any, Any]:
    tokens = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    tokenizer = tokenizer_with(*tokens.values(), **tokens)
    images = transformers.Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    processor = transformers.Gemma3Processor(
        images,
        tokenizer,
        image_seq_length=4,
        chat_template=TEMPLATE.replace("IMAGE", "<start_of_image>"),
    )
    ids = dict(zip(tokens, tokenizer.convert_tokens_to_ids(list(tokens.values())), strict=True))
    config = transformers.Gemma3Config(
        vision_config={"model_type": "siglip_vision_model", **VISION, "vision_use_head": False},
        text_config={**TEXT, "head_dim": 16, "sliding_window": 32},
        mm_tokens_per_image=4,
        image_token_index=ids["image_token"],
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
    )
    return config, processor


def qwen2_5_vl() -> tuple[Any, Any]:
    tokens = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer = tokenizer_with(*tokens)
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, temporal_patch_size=2, merge_size=2, min_pixels=64, max_pixels=256
    )
    template = TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    processor = without_videos(transformers.Qwen2_5_VLProcessor)(
        images, tokenizer, chat_template=template
    )
    processor.video_processor = {
        "video_processor_type": "Qwen2VLVideoProcessor",
        "patch_size": 4,
        "merge_size": 2,
    }
    names = ("vision_start", "vision_end", "image", "video")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(list(tokens)), strict=True))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = transformers.Qwen2_5_VLConfig(
        vision_config={**QWEN_VISION, "fullatt_block_indexes": [1], "window_size": 16},
        text_config={**TEXT, "bos_token_id": 1, "eos_token_id": 2, "rope_parameters": rope},
        **{f"{name}_token_id": token for name, token in ids.items()},
    )
    return config, processor


def gemma4() -> tuple[Any, Any]:
    tokens = {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    }
    tokenizer = tokenizer_with(*tokens.values(), "<|video|>", **tokens)
    images = transformers.Gemma4ImageProcessorPil(
        patch_size=4, max_soft_tokens=70, pooling_kernel_size=2
    )
    made = without_videos(transformers.Gemma4Processor)
    sounds = transformers.Gemma4AudioFeatureExtractor()
    template = TEMPLATE.replace("IMAGE", "<|image|>")
    processor = made(sounds, images, tokenizer, None, chat_template=template)
    processor.video_processor = type(made.video_processor)(
        video_processor_type="Gemma4VideoProcessor"
    )
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
    heads = {"head_dim": 16, "global_head_dim": 16}
    image, start, end = tokenizer.convert_tokens_to_ids([*tokens.values()][:3])
    config = transformers.Gemma4Config(
        text_config={
            **TEXT,
            **layers,
            **heads,
            "num_global_key_value_heads": 2,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "use_bidirectional_attention": "vision",
        },
        vision_config={
            **VISION,
            **heads,
            "num_key_value_heads": 2,
            "pooling_kernel_size": 2,
            "default_output_length": 70,
            "position_embedding_size": 64,
        },
        audio_config=None,
        image_token_id=image,
        boi_token_id=start,
        eoi_token_id=end,
    )
    return config, processor


def smolvlm() -> tuple[Any, Any]:
    places = [f"<row_{row}_col_{column}>" for row in range(1, 3) for column in range(1, 3)]
    tokenizer = tokenizer_with(
        "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *places
    )
    images = transformers.SmolVLMImageProcessorPil(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 16}, do_image_splitting=True
    )
    template = TEMPLATE.replace("IMAGE", "<image>")
    made = without_videos(transformers.SmolVLMProcessor)
    processor = made(images, tokenizer, None, image_seq_len=4, chat_template=template)
    processor.video_processor = type(made.video_processor)(
        video_processor_type="SmolVLMVideoProcessor"
    )
    return transformers.SmolVLMConfig(**idefics3_settings(tokenizer)), processor


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "llava": llava,
    "idefics3": idefics3,
    "gemma3": gemma3,
    "qwen2_5_vl": qwen2_5_vl,
}
if hasattr(transformers, "Gemma4ImageProcessorPil"):
    FAMILIES["gemma4"] = gemma4
if find_spec("num2words"):  # its processor is not made without
    FAMILIES["smolvlm"] = smolvlm


def make_base(directory: Path, family: str, context: int = TEXT["max_position_embeddings"]) -> Path:
    """A pretrained model of a family, as transformers itself saves it, with its processor."""
    config, processor = FAMILIES[family]()
    text = config.get_text_config()
    text.vocab_size, text.max_position_embeddings = len(processor.tokenizer), context
    torch.manual_seed(3)
    model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    assert read_processor(str(directory)) is not None
    return directory


def write_conversations(directory: Path, num: int = 20) -> Path:
    """Conversations about images of one colour, of different sizes; every fifth is text alone."""
    generator = np.random.default_rng(1)
    lines = []
    for number in range(num):
        name = list(COLOURS)[number % len(COLOURS)]
        size = (12 + 4 * (number % 3), 12 + 4 * (number % 2))
        pixels = np.array(COLOURS[name]) + generator.integers(-20, 20, (*size, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(directory / f"{number}.png")
        question: list[dict[str, str]] = [{"type": "text", "text": "What colour is this?"}]
        if number % 5 != 4:
            question.insert(0, {"type": "image", "image": f"{number}.png"})
        answer = [{"type": "text", "text": f"It is {name}"}]
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}))
    path = directory / "conversations.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path
