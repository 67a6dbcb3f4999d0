"""The kinds of media that samples have beside text, and which of them a processor takes."""

from __future__ import annotations

import inspect
from typing import Any

IMAGE = "image"
AUDIO = "audio"
MEDIA = (IMAGE, AUDIO)
Media = frozenset[str]
_USUAL_RATE = 16_000
"""The sampling rate in Hz that transformers assumes for a processor that states none."""


def media_of(processor: Any) -> Media:
    """The kinds of media that a processor takes."""
    parts = {
        IMAGE: getattr(processor, "image_processor", None),
        AUDIO: audio_processor_of(processor),
    }
    return frozenset(kind for kind, part in parts.items() if part is not None)


def audio_processor_of(processor: Any) -> Any:
    """The part of a processor that converts audio. Returns None when it has none."""
    for name in ("audio_processor", "feature_extractor"):
        part = getattr(processor, name, None)
        # In some classes for images alone, the image processor has this second name.
        if part is not None and part is not getattr(processor, "image_processor", None):
            return part
    return None


def takes_audio_with_text(processor: Any) -> bool:
    """Whether a processor that converts audio takes it beside texts in one call.

    Voxtral's does it only within its chat template, and Voxtral Realtime's only for a fixed request.
    """
    parameters = inspect.signature(processor.__call__).parameters
    return {"text", "audio"} <= parameters.keys()


def sampling_rate_of(processor: Any) -> int:
    """The sampling rate in Hz of the audio that a processor takes."""
    rate = getattr(audio_processor_of(processor), "sampling_rate", None)
    return int(rate or _USUAL_RATE)


def placeholders_of(processor: Any) -> dict[str, str]:
    """The text that a processor replaces by each kind of media; kinds without such a text are left out."""
    tokens = {kind: getattr(processor, f"{kind}_token", None) for kind in MEDIA}
    return {kind: token for kind, token in tokens.items() if isinstance(token, str) and token}


def usual_media(processor: Any) -> Media:
    """The kinds of media that samples may have if nothing else is known: images, if the processor takes them."""
    found = media_of(processor)
    return frozenset([IMAGE]) if IMAGE in found else found


def media_of_data(dataset: Any, processor: Any) -> Media:
    """The kinds of media that the samples of a data set, or of the sources of a mixture, may have."""
    sources = getattr(dataset, "sources", None)
    if isinstance(sources, dict):
        return frozenset[str]().union(
            *(media_of_data(each, processor) for each in sources.values())
        )
    media = getattr(dataset, "media", None)
    return media if isinstance(media, frozenset) else usual_media(processor)
