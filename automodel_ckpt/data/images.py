"""Images of a data set: by path, as bytes, or opened already. Needs Pillow, which the extra ``vision`` brings."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automodel_ckpt.data.messages import UnusableSample
from automodel_ckpt.errors import RecipeError

_REMEDY = (
    "give the path of an image file, absolute or relative to the data file, or remove this sample"
)


def pillow() -> Any:
    """Pillow's module ``Image``; :class:`RecipeError` where it is not installed."""
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
    """A Pillow image in RGB of a path (relative ones start from *folder*), of bytes, of ``{"path" or "bytes": ...}`` as
    the ``datasets`` library stores it, or of an image. Raises :class:`UnusableSample` for anything else."""
    image_module = pillow()
    source = _source(value, folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", image_module.DecompressionBombWarning)
            opened = source if isinstance(source, image_module.Image) else image_module.open(source)
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
        raise UnusableSample(
            "an image cannot be read", f"{value_shown} ({why})", _REMEDY
        ) from error


def _source(value: Any, folder: Path) -> Any:
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return io.BytesIO(value)
    if not isinstance(value, str):
        return value
    if "://" in value or value.startswith("data:"):
        raise UnusableSample(
            "an image is not a local file, and images are not downloaded", value[:80], _REMEDY
        )
    return folder / Path(value).expanduser()
