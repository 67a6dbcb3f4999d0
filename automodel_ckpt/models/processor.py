"""Reading a processor; where torchvision is not installed, without the part for videos that some families have.

The processors of Qwen2.5-VL, SmolVLM, InternVL and others are not made without torchvision, though only videos need it:
images are prepared with Pillow as well. The recipes train on images.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils.hub import cached_file
from transformers.utils.import_utils import is_torchvision_available

from automodel_ckpt.checkpoint.files.safe_open import parse_json
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.models.inspect.repository import RepositoryOptions, from_library_first

log = logging.getLogger("automodel_ckpt")

_AUTO: Any = AutoProcessor  # its class methods have no annotations
_PROCESSOR: Any = transformers.ProcessorMixin
_VIDEOS = "video_processor"
_PIXEL_LIMITS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Setting of Qwen-VL's image processors -> its name in their ``size``, where both are numbers of pixels."""
_MAIN_REVISION = RepositoryOptions()


def read_processor(
    name: str,
    repository: RepositoryOptions = _MAIN_REVISION,
    settings: Values | None = None,
) -> Any:
    """Read the processor of a directory or Hub name, with other values of some *settings*.

    Without torchvision, it has no part for videos, which is then logged. A class of its repository is used only if
    transformers has none and *repository* allows it. Raises OSError, ValueError or ImportError if there is none.
    """
    settings = dict(settings or {})
    # Passed to ``from_pretrained``, transformers 5 would use them too, with a warning for each image.
    limits = {name: settings.pop(name) for name in _PIXEL_LIMITS if name in settings}
    processor = _read(name, repository, settings)
    image_processor: Any = getattr(processor, "image_processor", None)
    if _has_pixel_limits(image_processor):
        for name, value in limits.items():
            image_processor.size[_PIXEL_LIMITS[name]] = value
    return processor


def _read(name: str, repository: RepositoryOptions, settings: Values) -> Any:
    from_pretrained = functools.partial(_AUTO.from_pretrained, **settings)
    try:
        return from_library_first(from_pretrained, name, repository)
    except (ImportError, OSError) as error:
        processor_class = None if is_torchvision_available() else _class_of(name)
        if processor_class is None or _VIDEOS not in processor_class.get_attributes():
            raise
        try:
            processor = without_videos(processor_class).from_pretrained(
                name, trust_remote_code=False, **settings
            )
        except (AttributeError, TypeError):  # it is not made without that part
            raise error from None
    log.info(
        "%s is loaded without its video processor, which requires torchvision",
        processor_class.__name__,
    )
    return processor


def _has_pixel_limits(image_processor: Any) -> bool:
    """Whether the ``size`` of an image processor is a smallest and a largest number of pixels."""
    size: Any = getattr(image_processor, "size", None)
    if size is None or not all(size.get(name) for name in _PIXEL_LIMITS.values()):
        return False
    declared = getattr(getattr(image_processor, "valid_kwargs", None), "__annotations__", {})
    return declared.keys() >= _PIXEL_LIMITS.keys()


def unknown_settings(processor: Any, names: Iterable[str]) -> list[str]:
    """Return those *names* of settings that neither the processor nor one of its parts has.

    transformers ignores such settings.
    """
    known: set[str] = set()
    parts = (processor, getattr(processor, "image_processor", None), processor.tokenizer)
    for part in parts:
        known.update(vars(part) if hasattr(part, "__dict__") else ())
        known.update(dir(type(part)))
        # The image processors of transformers 5 declare their settings in a TypedDict.
        declared = getattr(part, "valid_kwargs", None)
        known.update(getattr(declared, "__annotations__", {}))
    known -= _PIXEL_LIMITS.keys()
    if _has_pixel_limits(parts[1]):
        known |= _PIXEL_LIMITS.keys()
    return sorted(set(names) - known)


def _class_of(name: str) -> Any:
    """The class of transformers that the processor of a directory or Hub name has; None where none is named."""
    try:
        return PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(name, trust_remote_code=False))]
    except (OSError, ValueError, KeyError):  # no model's files: a processor alone
        content = _content(name, "processor_config.json")
        named = getattr(transformers, str(content.get("processor_class")), None)
        is_processor = isinstance(named, type) and issubclass(named, transformers.ProcessorMixin)
        return named if is_processor else None


def _content(name: str, file: str) -> ValueDict:
    """Return the content of a JSON file of a directory or Hub name; empty if there is no such file."""
    try:
        path = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    except OSError:  # no such place, or out of reach
        return {}
    return parse_json(Path(path).read_bytes()) if path else {}


class _Settings(ValueDict):
    """The settings for videos. It replaces the video processor: some processors read its attributes."""

    def __getattr__(self, name: str) -> Any:
        # copy and pickle look up special methods, and would call the None of a missing one.
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)


class _IgnoresVideos(_PROCESSOR):  # type: ignore[misc]
    """Drops the part for videos that some processors (Gemma 4) pass to their base class."""

    all_parts: Sequence[str] = ()
    """The parts of the original class, in the order of its arguments."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.pop(_VIDEOS, None)
        if len(args) == len(self.all_parts):
            # Qwen-Omni's processors pass the parts by position.
            index = self.all_parts.index(_VIDEOS)
            args = args[:index] + args[index + 1 :]
        super().__init__(*args, **options)


@functools.cache
def without_videos(processor_class: Any) -> Any:
    """*processor_class* for text and images alone. It is saved as the original, with its settings for videos."""
    parts: list[str] = processor_class.get_attributes()

    class TextAndImages(processor_class, _IgnoresVideos):  # type: ignore[misc]
        video_processor = _Settings()
        all_parts = tuple(parts)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [part for part in parts if part != _VIDEOS]

        @classmethod
        def from_args_and_dict(
            cls, args: Sequence[Any], processor_dict: Values, **options: Any
        ) -> Any:
            given = list(args)
            others = {key: value for key, value in processor_dict.items() if key != _VIDEOS}
            # transformers passes the parts by position.
            given.insert(parts.index(_VIDEOS), None)
            return super().from_args_and_dict(given, others, **options)

        @classmethod
        def from_pretrained(cls, name: str | os.PathLike[str], **options: Any) -> Any:
            made = super().from_pretrained(name, **options)
            found = _content(str(name), "processor_config.json").get(_VIDEOS)
            for file in ("video_preprocessor_config.json", "preprocessor_config.json"):
                found = found or _content(str(name), file)
            made.video_processor = _Settings(found or {})
            return made

    # The class name is saved (processor_class), and other programs look it up in transformers.
    TextAndImages.__name__ = TextAndImages.__qualname__ = processor_class.__name__
    return TextAndImages
