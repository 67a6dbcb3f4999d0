"""The parts of vision-language models under common names, and the ids of their image tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedConfig

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
        "aligner",
    },
    "vision_tower": {"vision_tower", "vision_model", "visual", "vision_encoder", "image_encoder"},
    "language_model": {"language_model", "text_model", "lm_head"},
}
PARTS = ("vision_tower", "projector", "language_model")

_IMAGE_IDS = ("image_token_id", "image_token_index", "boi_token_index", "eoi_token_index")


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
    """The ids of tokens that the model replaces by image features or that delimit them; they get no labels."""
    owners = (config, processor, getattr(processor, "tokenizer", None))
    names = (
        *_IMAGE_IDS,
        "vision_start_token_id",
        "vision_end_token_id",
        "boi_token_id",
        "eoi_token_id",
    )
    found = set()
    for owner in owners:
        for name in names:
            token = getattr(owner, name, None)
            if isinstance(token, int) and token >= 0:
                found.add(token)
    return frozenset(found)


def image_settings(processor: Any, default: PreTrainedConfig) -> dict[str, int]:
    """The ids of image tokens, from *processor*, for the settings that a configuration of *default*'s type has."""
    tokenizer = getattr(processor, "tokenizer", processor)
    image = getattr(tokenizer, "image_token_id", None) or getattr(processor, "image_token_id", None)
    known = {
        "image_token_id": image,
        "image_token_index": image,
        "boi_token_index": getattr(tokenizer, "boi_token_id", None),
        "eoi_token_index": getattr(tokenizer, "eoi_token_id", None),
    }
    return {
        name: token
        for name, token in known.items()
        if isinstance(token, int) and hasattr(default, name)
    }
