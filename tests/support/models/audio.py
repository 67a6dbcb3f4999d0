"""Tiny models of audio and text with their processors, and conversations with audio to train on."""

import json
import wave
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import AutoModelForMultimodalLM

from automodel_ckpt.models.processor import read_processor, without_videos
from tests.support.models import vision
from tests.support.models.sizes import model_sizes
from tests.support.models.vision import QWEN_VISION, TEMPLATE, TEXT, tokenizer_with

RATE = 16_000
AUDIO = {
    "num_mel_bins": 8,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
}
AUDIO_TEMPLATE = TEMPLATE.replace(
    "{% if c['type'] == 'image' %}",
    "{% if c['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% elif c['type'] == 'image' %}",
).replace("IMAGE", "<|vision_bos|><|IMAGE|><|vision_eos|>")
TONES = {"red": 300, "green": 700, "blue": 1500, "grey": 3000}
"""Word -> frequency in Hz."""


def qwen2_audio() -> tuple[Any, Any]:
    tokenizer = tokenizer_with("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    sounds = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    processor = transformers.Qwen2AudioProcessor(sounds, tokenizer, chat_template=AUDIO_TEMPLATE)
    config = transformers.Qwen2AudioConfig(
        audio_config={"model_type": "qwen2_audio_encoder", "max_source_positions": 50, **AUDIO},
        text_config={"model_type": "qwen2", **TEXT},
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    return config, processor


def omni(family: str, audio: dict[str, Any], tower: dict[str, Any], text: dict[str, Any]) -> Any:
    names = {
        "image_token": "<|IMAGE|>",
        "audio_token": "<|AUDIO|>",
        "video_token": "<|VIDEO|>",
        "vision_bos_token": "<|vision_bos|>",
        "vision_eos_token": "<|vision_eos|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
    }
    tokenizer = tokenizer_with(*names.values(), **names)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    sounds = transformers.WhisperFeatureExtractor(
        feature_size=8, chunk_length=2, return_attention_mask=True
    )
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, temporal_patch_size=2, merge_size=2, min_pixels=64, max_pixels=256
    )
    made = without_videos(getattr(transformers, f"{family}Processor"))
    processor = made(images, None, sounds, tokenizer, chat_template=AUDIO_TEMPLATE)
    processor.video_processor = type(made.video_processor)(
        video_processor_type="Qwen2VLVideoProcessor",
        patch_size=4,
        merge_size=2,
        temporal_patch_size=2,
    )
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    of_tokens = {}
    for kind in ("audio", "image", "video"):
        of_tokens[f"{kind}_token_id"] = of_tokens[f"{kind}_token_index"] = ids[f"{kind}_token"]
    config = getattr(transformers, f"{family}ThinkerConfig")(
        audio_config={**AUDIO, "output_dim": 32, "max_source_positions": 100, **audio},
        vision_config={**QWEN_VISION, **tower},
        text_config={**TEXT, "rope_parameters": rope, **text},
        vision_start_token_id=ids["vision_bos_token"],
        vision_end_token_id=ids["vision_eos_token"],
        audio_start_token_id=ids["audio_bos_token"],
        audio_end_token_id=ids["audio_eos_token"],
        **of_tokens,
    )
    return config, processor


def qwen2_5_omni() -> tuple[Any, Any]:
    towers = {"fullatt_block_indexes": [1], "window_size": 16}
    return omni("Qwen2_5Omni", {"n_window": 10}, towers, {})


def qwen3_omni() -> tuple[Any, Any]:
    audio = {"n_window": 50, "n_window_infer": 100, "downsample_hidden_size": 8}
    towers = {"deepstack_visual_indexes": [1], "num_position_embeddings": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    text = {"head_dim": 16, "decoder_sparse_step": 1, **experts}
    return omni("Qwen3OmniMoe", audio, towers, text)


def gemma4() -> tuple[Any, Any]:
    base, processor = vision.gemma4()
    tokens = {"audio": "<|audio|>", "boa": "<|audio>", "eoa": "<audio|>"}
    ids = {
        f"{name}_token_id": processor.tokenizer.convert_tokens_to_ids(token)
        for name, token in tokens.items()
    }
    processor.chat_template = _template(tokens["audio"], "<|image|>")
    audio = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "output_proj_dims": 32,
        "subsampling_conv_channels": [128, 1],
    }
    config = type(base)(**{**base.to_dict(), "audio_config": audio, **ids})
    return config, processor


def _template(audio_token: str, image_token: str = "") -> str:
    """A chat template with these tokens for audio and images."""
    start, end = AUDIO_TEMPLATE.index("<|audio_bos|>"), AUDIO_TEMPLATE.index("{% elif")
    template = AUDIO_TEMPLATE[:start] + audio_token + AUDIO_TEMPLATE[end:]
    return template.replace("<|vision_bos|><|IMAGE|><|vision_eos|>", image_token)


def glm_asr() -> tuple[Any, Any]:
    tokenizer = tokenizer_with("<|AUDIO|>")
    sounds = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=2)
    processor = transformers.GlmAsrProcessor(
        sounds, tokenizer, chat_template=_template("<|AUDIO|>"), audio_token="<|AUDIO|>"
    )
    tower = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.GlmAsrConfig(
        audio_config={
            **tower,
            "num_attention_heads": 2,
            "num_mel_bins": 8,
            "max_position_embeddings": 100,
        },
        text_config={"model_type": "llama", **TEXT},
        audio_token_id=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    return config, processor


def qwen3_asr() -> tuple[Any, Any]:
    names = {
        "audio_token": "<|AUDIO|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
    }
    tokenizer = tokenizer_with(*names.values(), **names)
    sounds = transformers.Qwen3ASRFeatureExtractor(feature_size=8)
    template = _template("<|audio_bos|><|AUDIO|><|audio_eos|>")
    processor = transformers.Qwen3ASRProcessor(sounds, tokenizer, chat_template=template)
    audio = {"n_window": 50, "n_window_infer": 100, "downsample_hidden_size": 8, "output_dim": 32}
    config = transformers.Qwen3ASRConfig(
        audio_config={**AUDIO, **audio},
        text_config={"model_type": "qwen3", **TEXT, "head_dim": 16},
        audio_token_id=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
        pad_token_id=0,
        eos_token_id=2,
    )
    return config, processor


def fun_asr_nano() -> tuple[Any, Any]:
    tokenizer = tokenizer_with("<|AUDIO|>")
    sounds = transformers.FunAsrNanoFeatureExtractor(feature_size=8)
    processor = transformers.FunAsrNanoProcessor(
        sounds, tokenizer, chat_template=_template("<|AUDIO|>"), audio_token="<|AUDIO|>"
    )
    tower = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = transformers.FunAsrNanoConfig(
        audio_config={
            **tower,
            "intermediate_size": 48,
            "num_mel_bins": 8,
            "num_timestamp_prediction_layers": 1,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        adaptor_config={**tower, "intermediate_size": 8, "projector_hidden_size": 48},
        text_config={"model_type": "qwen3", **TEXT, "head_dim": 16},
        audio_token_id=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    return config, processor


def granite_speech(family: str = "GraniteSpeech") -> tuple[Any, Any]:
    tokenizer = tokenizer_with("<|audio|>")
    sounds = transformers.GraniteSpeechFeatureExtractor()
    processor = transformers.GraniteSpeechProcessor(
        sounds, tokenizer, chat_template=_template("<|audio|>")
    )
    config = getattr(transformers, f"{family}Config")(
        text_config={"model_type": "granite", **TEXT},
        encoder_config={
            "input_dim": 160,
            "num_layers": 2,
            "hidden_dim": 32,
            "feedforward_mult": 2,
            "num_heads": 2,
            "dim_head": 16,
            "output_dim": 8,
            "context_size": 20,
            "max_pos_emb": 32,
            "dropout": 0.0,
            "conv_kernel_size": 5,
        },
        projector_config={
            "model_type": "blip_2_qformer",
            **model_sizes(hidden=32, layers=1, heads=2, inner=48),
            "encoder_hidden_size": 32,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids("<|audio|>"),
        has_lora_adapter=False,
    )
    return config, processor


def phi4_multimodal() -> tuple[Any, Any]:
    names = {"image_token": "<|IMAGE|>", "audio_token": "<|AUDIO|>"}
    tokenizer = tokenizer_with(*names.values(), **names)
    image, audio = tokenizer.convert_tokens_to_ids([*names.values()])
    processor = transformers.Phi4MultimodalProcessor(
        transformers.Phi4MultimodalImageProcessor(size={"height": 28, "width": 28}, patch_size=14),
        transformers.Phi4MultimodalFeatureExtractor(feature_size=8),
        tokenizer,
        chat_template=_template("<|AUDIO|>", "<|IMAGE|>"),
    )
    config = transformers.Phi4MultimodalConfig(
        **TEXT,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        vision_config={
            **model_sizes(hidden=32, inner=48, layers=3, heads=2),
            "crop_size": 28,
            "image_size": 28,
            "patch_size": 14,
            "image_token_id": image,
        },
        audio_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_blocks": 2,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "input_size": 8,
            "nemo_conv_channels": 32,
            "audio_token_id": audio,
        },
    )
    return config, processor


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "qwen2_audio": qwen2_audio,
    "qwen2_5_omni": qwen2_5_omni,
    "qwen3_omni": qwen3_omni,
    "glm_asr": glm_asr,
    "qwen3_asr": qwen3_asr,
}
# The feature extractors of Granite Speech and Fun-ASR need torchaudio, and the image processor of Phi-4 torchvision.
if find_spec("torchaudio") is not None:
    FAMILIES["granite_speech"] = granite_speech
    FAMILIES["granite_speech_plus"] = partial(granite_speech, "GraniteSpeechPlus")
    FAMILIES["fun_asr_nano"] = fun_asr_nano
if find_spec("torchvision") is not None:
    FAMILIES["phi4_multimodal"] = phi4_multimodal
if "gemma4" in vision.FAMILIES:
    FAMILIES["gemma4"] = gemma4


def make_base(directory: Path, family: str) -> Path:
    """A pretrained model of a family, as transformers itself saves it, with its processor."""
    config, processor = FAMILIES[family]()
    text = config.get_text_config()
    text.vocab_size = len(processor.tokenizer)
    torch.manual_seed(3)
    AutoModelForMultimodalLM.from_config(config).save_pretrained(directory)
    processor.save_pretrained(directory)
    assert read_processor(str(directory)) is not None
    return directory


def tone(frequency: float, seconds: float, rate: int = RATE) -> npt.NDArray[np.int16]:
    """A sine wave as PCM samples of 16 bits."""
    times = np.arange(int(seconds * rate)) / rate
    return (8000 * np.sin(2 * np.pi * frequency * times)).astype(np.int16)


def read_wave(path: Path) -> npt.NDArray[np.float32]:
    """The samples of a WAV file with one channel of 16 bits, from -1 to 1."""
    with wave.open(str(path), "rb") as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    return samples.astype(np.float32) / 2**15


def write_wav(path: Path, samples: npt.NDArray[Any], rate: int = RATE, width: int = 2) -> Path:
    """Write PCM samples [length] or [length, channels] of *width* bytes as a WAV file."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return path


ONE_AUDIO = ("glm_asr", "qwen3_asr", "fun_asr_nano")
"""Families whose processors take exactly one audio per conversation."""


def write_conversations(directory: Path, num: int = 20, *, has_text: bool = True) -> Path:
    """Conversations about tones of different lengths; with *has_text*, every fifth is text alone."""
    lines = []
    for number in range(num):
        name = list(TONES)[number % len(TONES)]
        question: list[dict[str, str]] = [{"type": "text", "text": "What colour is this?"}]
        if number % 5 != 4 or not has_text:
            write_wav(directory / f"{number}.wav", tone(TONES[name], 0.2 + 0.1 * (number % 3)))
            question.insert(0, {"type": "audio", "audio": f"{number}.wav"})
        answer = [{"type": "text", "text": f"It is {name}"}]
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}))
    path = directory / "conversations.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path
