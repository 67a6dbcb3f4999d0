"""Open the images of a data set: paths, bytes, or Pillow images. Requires Pillow (the extra ``vision``)."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from automodel_ckpt.data.messages import UnusableSample
from automodel_ckpt.errors import RecipeError

_HINT = (
    "give the path of an image file, absolute or relative to the data file, or remove this sample"
)
_ORIENTATION = 0x0112
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""Orientation of EXIF -> what puts the image upright (source: PIL.ImageOps.exif_transpose)."""
_MAX_SHOWN = 200
"""Characters of a value in an error message."""


def pillow() -> Any:
    """Import Pillow's module ``Image``. Raises :class:`RecipeError` if Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise RecipeError(
            "images require Pillow",
            where="recipe: vlm_finetune",
            value=str(error),
            hint="install it: pip install 'automodel_ckpt[vision]'",
        ) from error
    return Image


def open_image(value: Any, folder: Path) -> Any:
    """Open an image as a Pillow image in RGB with 8 bits per channel, turned upright as its EXIF data state.

    *value* is a path (relative paths start at *folder*), a ``file://`` or ``data:`` URL, bytes, a Pillow image, or a
    mapping with one of them in ``bytes``, ``path`` or ``url``, or with text in ``base64``. The library ``datasets``
    stores images as such mappings. Raises :class:`UnusableSample` for any other value, and for a damaged image.
    """
    image_module = pillow()
    source = _source(value, folder)
    shown = str(source) if isinstance(source, Path) else f"{type(source).__name__} of the data"
    if isinstance(source, bytes):
        shown = f"{len(source)} bytes of the data"
        source = io.BytesIO(source)
    try:
        with warnings.catch_warnings():
            # Above its limit of pixels, Pillow only warns. It raises an error above twice the
            # limit.
            warnings.simplefilter("error", image_module.DecompressionBombWarning)
            opened = source
            if not isinstance(source, image_module.Image):
                opened = image_module.open(source)
            return _with_8_bits(_upright(opened)).convert("RGB")
    except MemoryError:
        raise
    except UnusableSample as error:
        raise UnusableSample(
            error.what, f"{_shortened(shown)} ({error.value})", error.hint
        ) from error
    except Exception as error:  # damaged files make Pillow's decoders raise many types
        raise UnusableSample(
            "an image cannot be read", f"{_shortened(shown)} ({_reason(error)})", _HINT
        ) from error


def _source(value: Any, folder: Path) -> Any:
    """Return the path, the bytes or the Pillow image that *value* names."""
    if isinstance(value, Mapping):
        value = _in_mapping(value)
    if isinstance(value, bytearray | memoryview):
        value = bytes(value)
    if isinstance(value, bytes | pillow().Image):
        return value
    if not isinstance(value, str) or not value:
        raise UnusableSample(
            "an image is neither a path nor the content of a file", _shortened(repr(value)), _HINT
        )
    if value.startswith("data:"):
        _, _, content = value.partition(";base64,")
        return _decoded(content, value)
    if value.startswith("file://"):
        value = value.removeprefix("file://")
    if "://" in value:
        raise UnusableSample(
            "an image is not a local file, and images are not downloaded", value[:80], _HINT
        )
    try:
        return folder / Path(value).expanduser()
    except RuntimeError:  # the home directory of an unknown user: a file whose name begins with ~
        return folder / value


def _in_mapping(value: Mapping[Any, Any]) -> Any:
    if isinstance(value.get("base64"), str):
        return _decoded(value["base64"], value["base64"])
    for key in ("bytes", "path", "url"):
        if value.get(key):
            return value[key]
    return dict(value)


def _decoded(content: str, value: str) -> bytes:
    """Decode base64 text. Raises :class:`UnusableSample` if it is not base64, or empty."""
    try:
        decoded = base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        decoded = b""
    if not decoded:
        raise UnusableSample("an image in the data is not base64 text", value[:80], _HINT)
    return decoded


def _with_8_bits(image: Any) -> Any:
    """Scale a grayscale image of 16 bits to 8 bits; return others unchanged.

    Pillow would clip the values, so that nearly all pixels would be white. Raises :class:`UnusableSample` for pixels
    of 32 bits, whose largest value no file format defines.
    """
    # Pillow reads 16 bits of a PGM file into 32, scaled so that white is 65535.
    if image.mode == "I" and image.format == "PPM":
        return pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise UnusableSample(
            "an image has 32 bits per pixel, whose range of brightness is not known",
            f"mode {image.mode}",
            "convert it to 8 or 16 bits per channel, scaled so that the largest value is white",
        )
    if not image.mode.startswith("I;16"):
        return image
    return pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))


def _upright(image: Any) -> Any:
    """Turn an image as its EXIF data state, as transformers, datasets and viewers do; not if these are damaged."""
    # First, because it raises the errors of damaged pixels, and turns TIFF files itself.
    image.load()
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except Exception:  # as for damaged files: many types
        return image
    # Not ImageOps.exif_transpose: it also writes the EXIF data again, and fails on values that it cannot write.
    turn = _TURNS.get(orientation)
    return image if turn is None else image.transpose(pillow().Transpose[turn])


def _reason(error: Exception) -> str:
    reason = str(getattr(error, "strerror", None) or error or type(error).__name__)
    if type(error).__name__ == "UnidentifiedImageError":
        # Its text repeats the path, or the address of an object in memory.
        return "not an image of a known format"
    return _shortened(reason)


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
