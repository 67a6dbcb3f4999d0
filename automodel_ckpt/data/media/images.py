"""Open the images of a data set: paths, bytes, or Pillow images. Requires Pillow (the extra ``vision``)."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from automodel_ckpt.data.conversations.messages import UnusableSample
from automodel_ckpt.data.media.media_source import MediaReader, shortened, shown
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
    source = MediaReader("an image", _HINT, (image_module.Image,)).source(value, folder)
    where = shown(source)
    if isinstance(source, bytes):
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
        raise UnusableSample(error.what, f"{where} ({error.value})", error.hint) from error
    except Exception as error:  # damaged files make Pillow's decoders raise many types
        raise UnusableSample(
            "an image cannot be read", f"{where} ({_reason(error)})", _HINT
        ) from error


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
    return shortened(reason)
