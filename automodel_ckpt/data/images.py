"""Open the images of a data set: paths, bytes, or Pillow images. Requires Pillow (the extra ``vision``)."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automodel_ckpt.data.messages import UnusableSample
from automodel_ckpt.errors import RecipeError

_HINT = (
    "give the path of an image file, absolute or relative to the data file, or remove this sample"
)


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
    """Open an image as a Pillow image in RGB.

    *value* is a path (relative paths start at *folder*), bytes, a Pillow image, or ``{"path": ...}`` or ``{"bytes":
    ...}``, as the library ``datasets`` stores images. Raises :class:`UnusableSample` for any other value.
    """
    image_module = pillow()
    source = _source(value, folder)
    try:
        with warnings.catch_warnings():
            # Above its limit of pixels, Pillow only warns. It raises an error above twice the
            # limit.
            warnings.simplefilter("error", image_module.DecompressionBombWarning)
            opened = source
            if not isinstance(source, image_module.Image):
                opened = image_module.open(source)
            return opened.convert("RGB")
    except (
        OSError,
        ValueError,
        SyntaxError,
        AttributeError,
        Warning,
        image_module.DecompressionBombError,
    ) as error:
        value_shown = source if isinstance(source, Path) else type(value).__name__
        why = getattr(error, "strerror", None) or error
        raise UnusableSample("an image cannot be read", f"{value_shown} ({why})", _HINT) from error


def _source(value: Any, folder: Path) -> Any:
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return io.BytesIO(value)
    if not isinstance(value, str):
        return value
    if "://" in value or value.startswith("data:"):
        raise UnusableSample(
            "an image is not a local file, and images are not downloaded", value[:80], _HINT
        )
    return folder / Path(value).expanduser()
