"""The parts of models with images or audio under common names, and the ids of the tokens of their images and audio."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable
from typing import Any

import transformers
from transformers import AutoModelForImageTextToText, PreTrainedConfig

# In order of precedence: a projector may be located inside the vision tower.
_PARTS = {
    "projector": {
        "multi_modal_projector",
        "connector",
        "merger",
        "deepstack_merger_list",
        "mm_projector",
        "projector",
        "modality_projection",
        "vision_projection",
        "embed_vision",
        "embed_audio",
        "aligner",
    },
    "vision_tower": {"vision_tower", "vision_model", "visual", "vision_encoder", "image_encoder"},
    "audio_tower": {"audio_tower", "audio_encoder", "audio_model", "audio_embed"},
    "language_model": {"language_model", "text_model", "lm_head"},
}
PARTS = ("vision_tower", "audio_tower", "projector", "language_model")

_MEDIA_IDS = (
    "image_token_id",
    "image_token_index",
    "boi_token_id",
    "boi_token_index",
    "eoi_token_id",
    "eoi_token_index",
    "vision_start_token_id",
    "vision_end_token_id",
    "audio_token_id",
    "audio_token_index",
    "audio_start_token_id",
    "audio_end_token_id",
    "audio_bos_token_id",
    "audio_eos_token_id",
    "boa_token_id",
    "eoa_token_id",
)
_IMAGES: Any = AutoModelForImageTextToText
# Versions without it have no models of audio alone.
_ALL: Any = getattr(transformers, "AutoModelForMultimodalLM", AutoModelForImageTextToText)


def parameters_of(part: str, names: Iterable[str]) -> list[str]:
    """The parameter *names* that belong to *part*, one of :data:`PARTS`."""
    return [name for name in names if part_of(name) == part]


def part_of(name: str) -> str | None:
    """The part of :data:`PARTS` that a parameter or module with this name belongs to; None for other names."""
    components = set(name.split("."))
    for part, names in _PARTS.items():
        if names & components:
            return part
    return None


def image_token_ids(config: PreTrainedConfig | None, processor: Any) -> frozenset[int]:
    """The ids of tokens that the model replaces by features of images or audio, or that delimit them.

    They get no labels.
    """
    owners = (config, processor, getattr(processor, "tokenizer", None))
    tokens = [getattr(owner, name, None) for owner in owners for name in _MEDIA_IDS]
    return frozenset(token for token in tokens if isinstance(token, int) and token >= 0)


def image_settings(processor: Any, default: PreTrainedConfig) -> dict[str, int]:
    """The ids of tokens of images and audio, from *processor*, for the settings that a config as *default* has."""
    tokenizer = getattr(processor, "tokenizer", processor)
    image = getattr(tokenizer, "image_token_id", None) or getattr(processor, "image_token_id", None)
    audio = getattr(tokenizer, "audio_token_id", None) or getattr(processor, "audio_token_id", None)
    known = {
        "image_token_id": image,
        "image_token_index": image,
        "audio_token_id": audio,
        "audio_token_index": audio,
        "boi_token_index": getattr(tokenizer, "boi_token_id", None),
        "eoi_token_index": getattr(tokenizer, "eoi_token_id", None),
    }
    return {
        name: token
        for name, token in known.items()
        if isinstance(token, int) and hasattr(default, name)
    }


class AutoMultimodalModel(AutoModelForImageTextToText):
    """AutoModelForImageTextToText, also for the models of audio that AutoModelForMultimodalLM has."""


_OURS: Any = AutoMultimodalModel
_OURS._model_mapping = ChainMap(_IMAGES._model_mapping, _ALL._model_mapping)
# transformers registers the class of a repository with code. A ChainMap has no such method.
_OURS.register = _IMAGES.register
# Repositories with code name their class by it.
AutoMultimodalModel.__name__ = AutoModelForImageTextToText.__name__


def thinker_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of Qwen-Omni's configuration for the model that reads and writes text; other configurations unchanged.

    The files of these models also have a model that speaks, which is not trained. transformers reads the weights of the
    part from them.
    """
    thinker = getattr(config, "thinker_config", None)
    if not isinstance(thinker, PreTrainedConfig):
        return config
    thinker.name_or_path = config.name_or_path
    return thinker


def other_parts_in_files(config: PreTrainedConfig) -> list[str]:
    """Globs for the names of tensors beside the thinker in files of Qwen-Omni; empty for other models.

    transformers ignores them, but not in all versions.
    """
    is_thinker = config.model_type.endswith("_thinker")
    return ["talker.*", "token2wav.*", "code2wav.*"] if is_thinker else []
