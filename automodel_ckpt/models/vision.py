"""The parts of a vision-language model by one name each, whatever its family calls them; and its image tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedConfig

# The first part with one of its names in a parameter's path has it: a projector may lie inside the vision tower.
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
    """Those parameter *names* that belong to one of :data:`PARTS`."""
    return [name for name in names if _part_of(name) == part]


def _part_of(name: str) -> str | None:
    path = set(name.split("."))
    return next((part for part, words in _PARTS.items() if words & path), None)


def image_token_ids(config: PreTrainedConfig | None, processor: Any) -> frozenset[int]:
    """The tokens in whose places the model puts what it sees, or that frame it: nothing to be learnt as text."""
    owners = (config, processor, getattr(processor, "tokenizer", None))
    names = (
        *_IMAGE_IDS,
        "vision_start_token_id",
        "vision_end_token_id",
        "boi_token_id",
        "eoi_token_id",
    )
    ids = [getattr(owner, name, None) for owner in owners for name in names]
    return frozenset(token for token in ids if isinstance(token, int) and token >= 0)


def image_settings(processor: Any, default: PreTrainedConfig) -> dict[str, int]:
    """The ids of image tokens that a configuration of *default*'s type needs, as *processor* has them."""
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
