"""Normalize the content of a message to a list of parts: texts, images, audio, and what only a chat template knows.

Formats: the parts of transformers' chat templates (``{"type": "image", "image": ...}``, ``{"type": "audio", "audio":
...}``), of OpenAI's chat completions (``{"type": "image_url", "image_url": {"url": ...}}``, ``{"type": "input_audio",
"input_audio": {"data": ...}}``) and of its responses (``input_text``, ``input_image``).
"""

from __future__ import annotations

from typing import Any

from automodel_ckpt.data.conversations.messages import (
    Object,
    Turns,
    UnusableSample,
)

_TEXTS = ("text", "input_text", "output_text")
_IMAGES = ("image", "image_url", "input_image")
_IMAGE_KEYS = ("image", "path", "url", "image_url", "base64")
"""The keys of a part that may contain its image. transformers reads the same ones."""
_IMAGE_SETTINGS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""Keys of a part that change the size of its image in Qwen's tools. The processors of transformers ignore them."""
_AUDIOS = ("audio", "audio_url", "input_audio")
_AUDIO_KEYS = ("audio", "path", "url", "audio_url", "input_audio", "base64")
"""The keys of a part that may contain its audio."""
_OTHER_MEDIA = ("video", "video_url")
CHECKED_ROLES = ("system", "developer", "user", "assistant")
"""Parts of messages with these roles have a type. The results of tools may be any objects."""
_HINT = 'use parts such as {"type": "text", "text": "..."} and {"type": "image", "image": "..."}'


def parts_of(content: Any) -> Turns:
    """Convert a message's content to parts of the type ``text``, ``image``, ``audio``, or one that is left as it is.

    A text part has a text. The image of an image part, if it has one, is in its only other key, ``image``. The audio of
    an audio part is in ``audio``. Keys with the value null count as missing. Raises :class:`UnusableSample` for a part
    without a text, an image or a type.
    """
    if content is None or content == "":
        return []
    if isinstance(content, list):
        return [_part(entry) for entry in content]
    return [{"type": "text", "text": str(content)}]


def with_normal_media(content: Turns) -> Turns:
    """Convert the parts of a tool's result that are images or audio as :func:`parts_of` does; no others."""
    media = (*_IMAGES, *_AUDIOS)
    return [_part(entry) if entry.get("type") in media else entry for entry in content]


def check_types(parts: Turns, known: tuple[str, ...], template: str) -> None:
    """Raise :class:`UnusableSample` for a part of a type that is not *known* and that *template* does not name.

    The template would leave it out, and the model would be trained on a conversation without it.
    """
    for part in parts:
        kind = str(part["type"])
        if kind in known:
            continue
        if kind not in ("image", "audio", *_OTHER_MEDIA) and kind in template:
            continue
        hint = (
            "use a supported type, or set dataset.chat_template to a template that writes this type"
        )
        if kind in ("image", "audio"):
            hint = f"remove the sample; {kind}s require recipe: vlm_finetune and a model whose processor takes them"
        elif kind in _OTHER_MEDIA:
            hint = "remove this sample: models are not trained on videos here"
        raise UnusableSample(
            "a message has a part of a type that is not supported here",
            f"type: {kind} (supported: {', '.join(known)})",
            hint,
        )


def _part(entry: Any) -> Object:
    if isinstance(entry, str):
        return {"type": "text", "text": entry}
    if not isinstance(entry, dict):
        raise _unusable("a message has a part that is neither text nor an object", entry)
    # Typed tables contain nulls for the keys that only parts of other types have.
    part = {key: value for key, value in entry.items() if value is not None}
    kind = part.get("type")
    if not kind:
        # The only one of these keys that has a value. A text may be empty.
        named = [key for key in (*_IMAGE_KEYS, *_AUDIOS) if part.get(key)] or ["text"]
        kind = named[0] if len(named) == 1 else None
        kind = "image" if kind in _IMAGE_KEYS else kind
    if kind in _TEXTS:
        return _text_part(part)
    if kind in (*_IMAGES, *_AUDIOS):
        return _media_part(part, "image" if kind in _IMAGES else "audio")
    if not isinstance(kind, str):
        raise _unusable("a message has a part without a type", entry)
    return part


def _text_part(part: Object) -> Object:
    text = part.get("text")
    if isinstance(text, int | float) and not isinstance(text, bool):
        text = str(text)
    if not isinstance(text, str):
        # A template would write the word None, on which the model would be trained.
        raise _unusable("a text part of a message has no text", part)
    if any(part.get(key) for key in _IMAGE_KEYS):
        raise _unusable("a text part of a message has an image", part)
    others = {key: value for key, value in part.items() if key not in _IMAGE_KEYS}
    return {**others, "type": "text", "text": text}


def _media_part(part: Object, kind: str) -> Object:
    if part.get("text"):
        raise _unusable(f"an {kind} part of a message has a text", part)
    for key in _IMAGE_SETTINGS:
        if part.get(key):
            raise UnusableSample(
                "an image part of a message has a size of its own, which is not supported",
                f"{key}: {part[key]!r}",
                "remove it and resize the image, or limit all images with processor.kwargs",
            )
    for key in _AUDIO_KEYS if kind == "audio" else _IMAGE_KEYS:
        value = part.get(key)
        if not value:
            continue
        if isinstance(value, dict) and isinstance(value.get("data"), str):
            value = {"base64": value["data"]}
        elif key == "base64":
            value = {key: value}
        return {"type": kind, kind: value}
    return {"type": kind}


def _unusable(what: str, part: Any) -> UnusableSample:
    return UnusableSample(what, part, _HINT)
